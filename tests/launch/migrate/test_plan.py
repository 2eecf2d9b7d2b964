"""What each form of a program becomes, and what is refused, by its message."""

import ast
import difflib
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import ConfigurationError
from accelfn.launch.migrate import Level, Migration, plan_migration
from tests.launch.migrate.programs import framed


def changed(before: str, to: Level = "functions") -> str:
    migration = plan_migration(before, to=to)
    assert migration.refusals == ()
    return migration.text


def refusals(before: str, to: Level = "functions") -> list[str]:
    migration = plan_migration(before, to=to)
    assert migration.edits == ()
    assert migration.text == before
    return [f"{line}: {construct}: {text}" for line, construct, text in migration.refusals]


def body(text: str, count: int) -> str:
    """Return a program without its first lines, and without the indentation of the rest."""
    return textwrap.dedent("".join(text.splitlines(keepends=True)[count:]))


STEP = "accelerator.backward(model(batch))\noptimizer.step()\noptimizer.zero_grad()"

# The body of the loop over the loader, before and after.
LOOPS: dict[str, tuple[str, str]] = {}
for form in Path(__file__).with_name("loops.txt").read_text().split("\n=== ")[1:]:
    title, _, pair = form.partition("\n")
    first, _, second = pair.partition("\n---\n")
    LOOPS[title] = (first, f"{second.rstrip()}\n")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_rewritten(name: str) -> None:
    before, after = LOOPS[name]
    text = changed(framed(before))
    assert text.startswith("import torch\nimport accelfn as af\nctx = af.init_context()\n")
    prepared = "model, optimizer, loader, scheduler = af.prepare(ctx, model, optimizer, loader, scheduler)\n"
    assert (
        f"{prepared}scaler = af.init_scaler(ctx)\nfor batch, micro in af.microbatches(ctx, loader):\n" in text
    )
    assert body(text, 7) == after


# The head of the loop, before and after.
HEADS: dict[str, str] = {
    "for batch in loader:": "for batch, micro in af.microbatches(ctx, loader):",
    "for x, y in loader:": "for (x, y), micro in af.microbatches(ctx, loader):",
    "for (x, y) in loader:": "for (x, y), micro in af.microbatches(ctx, loader):",
    "for (x, z), y in loader:": "for ((x, z), y), micro in af.microbatches(ctx, loader):",
    "for i, b in enumerate(loader):": "for i, (b, micro) in enumerate(af.microbatches(ctx, loader)):",
    "for i, (x, y) in enumerate(loader, start=1):": "for i, ((x, y), micro) in "
    "enumerate(af.microbatches(ctx, loader), start=1):",
    "for batch in tqdm(loader, desc='a'):": "for batch, micro in "
    "tqdm(af.microbatches(ctx, loader), desc='a', total=len(loader)):",
    "for batch in tqdm.tqdm(loader, total=9):": "for batch, micro in "
    "tqdm.tqdm(af.microbatches(ctx, loader), total=9):",
    "for i, b in enumerate(tqdm(loader)):": "for i, (b, micro) in "
    "enumerate(tqdm(af.microbatches(ctx, loader), total=len(loader))):",
    "for i, b in tqdm(enumerate(loader)):": "for i, (b, micro) in "
    "tqdm(enumerate(af.microbatches(ctx, loader))):",
}


@pytest.mark.parametrize("head", HEADS)
def test_the_head_of_a_loop_yields_the_window(head: str) -> None:
    text = changed(framed(STEP.replace("batch", "0")).replace("for batch in loader:", head))
    assert HEADS[head] in text.splitlines()


# A statement outside of loops, before and after.
STATEMENTS: dict[str, str] = {
    "accelerator.print('a', accelerator.process_index)": "af.print_once(ctx, 'a', ctx.rank)",
    "accelerator.print(f'{accelerator.device}: {accelerator.num_processes:>3}')": "af.print_once(ctx, "
    "f'{ctx.device}: {ctx.num_processes:>3}')",
    "accelerator.wait_for_everyone()": "af.wait_for_everyone(ctx)",
    "x = accelerator.gather(x).mean()": "x = af.gather(ctx, x).mean()",
    "x = accelerator.reduce(x, reduction='mean')": "x = af.reduce(ctx, x, reduction='mean')",
    "x = accelerator.pad_across_processes(x, dim=1)": "x = af.pad_across_processes(ctx, x, dim=1)",
    "m = accelerator.unwrap_model(model)": "m = af.unwrap_model(model)",
    "m = accelerator.get_state_dict(model)": "m = af.get_state_dict(ctx, model)",
    "accelerator.save_model(model, 'a', max_shard_size='1GB')": "af.save_model(ctx, model, 'a', "
    "max_shard_size='1GB')",
    "accelerator.save_model(model, save_directory='a')": "af.save_model(ctx, model, directory='a')",
    "accelerator.save(x, 'a')": "af.checkpoint.save_object(ctx, x, 'a')",
    "if accelerator.is_local_main_process: pass": "if ctx.is_local_main_process: pass",
    "if accelerator.state.process_index == 0: pass": "if ctx.rank == 0: pass",
    "logger.info(accelerator.state)": "logger.info(ctx)",
    "if accelerator.use_distributed: pass": "if (ctx.num_processes > 1): pass",
    "with accelerator.main_process_first(): pass": "with af.main_process_first(ctx): pass",
    "with accelerator.profile() as p: pass": "with af.profile(ctx) as p: pass",
    "rest = accelerator.skip_first_batches(loader, 3)": "rest = af.skip_first_batches(loader, 3)",
    "model, x = accelerator.free_memory(model, x)": "model, x = af.release_memory(model, x)",
    "accelerator.end_training()": "af.close_context(ctx)",
    "x = (accelerator\n     .gather(  # all\n         x))": "x = (af.gather(  # all\n         ctx, x))",
}


@pytest.mark.parametrize("before", STATEMENTS)
def test_a_statement_is_rewritten(before: str) -> None:
    assert changed(framed(STEP) + before + "\n").endswith(f"\n{STATEMENTS[before]}\n")


def test_decorators_take_the_context() -> None:
    before = framed(STEP) + "@accelerator.on_main_process\ndef write(): ...\n"
    assert changed(before).endswith("@af.on_main_process(ctx)\ndef write(): ...\n")


def test_a_schedule_that_steps_after_an_epoch_goes_on() -> None:
    assert changed(framed(STEP) + "scheduler.step()\n").endswith(
        "af.scheduler_step(ctx, scheduler, scaler)\n"
    )


def test_checkpoints_hold_what_was_prepared_and_registered() -> None:
    before = framed(STEP).replace("for batch", "accelerator.load_state('a')\nfor batch")
    before = before.replace(
        "accelerator.load", "accelerator.register_for_checkpointing(ema)\naccelerator.load"
    )
    text = changed("ema = average()\n" + before + "accelerator.save_state(f'{folder}/a')\n")
    entries = ("model", "optimizer", "loader", "scheduler", "ema", "scaler")
    tree = "{\n" + "".join(f'    "{name}": {name},\n' for name in entries) + "}"
    assert f"scaler = af.init_scaler(ctx)\nscaler = af.load_state(ctx, 'a', {tree})[\"scaler\"]\nfor" in text
    assert text.endswith(f"af.save_state(ctx, f'{{folder}}/a', {tree})\n")


def test_trackers_are_a_value() -> None:
    before = framed(STEP, constructor="Accelerator(log_with='tensorboard')").replace(
        "for batch", "accelerator.init_trackers('a', {'lr': 1})\nfor batch"
    )
    after = changed(before + "accelerator.log({'loss': 1}, step=3)\naccelerator.end_training()\n")
    assert "\ntrackers = af.init_trackers(ctx, 'a', config={'lr': 1})\n" in after
    assert after.endswith(
        "af.log(trackers, {'loss': 1}, step=3)\naf.finish(trackers)\naf.close_context(ctx)\n"
    )


def test_functions_that_are_called_with_it_take_the_context() -> None:
    before = framed(
        STEP + "\nlog(batch, accelerator=accelerator)",
        head="def log(x, *, accelerator: Accelerator): accelerator.print(x)\n",
    )
    after = changed(before)
    assert "def log(x, *, ctx: af.Context): af.print_once(ctx, x)\n" in after
    assert "    log(batch, ctx=ctx)\n" in after


def test_functions_of_accelerate_take_the_context() -> None:
    before = framed(
        STEP, head="from accelerate.utils import gather as join, reduce, set_seed, DistributedType as D\n"
    )
    calls = (
        "x = join(x)\ny = reduce(y)\nz = reduce(z, 'sum')\nset_seed(3)\nset_seed(3, device_specific=True)\n"
    )
    functions, shim = changed(before + calls), changed(before + calls, "shim")
    for text, context in ((functions, "ctx"), (shim, "accelerator.context")):
        assert "from accelfn import gather as join, reduce, set_seed, DistributedType as D\n" in text
        assert text.endswith(
            f'x = join({context}, x)\ny = reduce({context}, y, reduction="mean")\n'
            f"z = reduce({context}, z, 'sum')\nset_seed(3)\n"
            f"set_seed(3, device_specific=True, ctx={context})\n"
        )


IMPORTS: dict[str, tuple[str, ...]] = {
    "from accelerate import Accelerator": ("import accelfn as af", "from accelfn import Accelerator"),
    "from accelerate import Accelerator, DistributedType": (
        "import accelfn as af\nfrom accelfn import DistributedType",
        "from accelfn import Accelerator, DistributedType",
    ),
    "from accelerate.logging import get_logger": ("from accelfn import get_logger",) * 2,
    "from accelerate.utils import (\n    set_seed,  # a\n    tqdm,\n)": (
        "from accelfn import (\n    set_seed,  # a\n    tqdm,\n)",
    )
    * 2,
    "from accelerate.utils import set_seed, get_max_memory": (
        "from accelfn import set_seed\nfrom accelfn.bigmodel import get_max_memory",
    )
    * 2,
    "from accelerate import init_empty_weights, load_checkpoint_and_dispatch": (
        "from accelfn import init_empty_weights, load_checkpoint_and_dispatch",
    )
    * 2,
    "import accelerate\naccelerate.utils.set_seed(1)": (
        "import accelfn as af\naf.set_seed(1)",
        "import accelfn\naccelfn.set_seed(1)",
    ),
    "import accelerate as ac\nac.utils.get_max_memory()": (
        "import accelfn as af\naf.bigmodel.get_max_memory()",
        "import accelfn as ac\nac.bigmodel.get_max_memory()",
    ),
    "def f():\n\tfrom accelerate import notebook_launcher  # late": (
        "def f():\n\tfrom accelfn import notebook_launcher  # late",
    )
    * 2,
}


@pytest.mark.parametrize("before", IMPORTS)
def test_names_are_imported_from_where_they_are(before: str) -> None:
    levels: tuple[Level, Level] = ("functions", "shim")
    assert tuple(changed(before, to) for to in levels) == IMPORTS[before]


def test_the_package_itself_makes_the_accelerator() -> None:
    before = "import accelerate\na = accelerate.Accelerator(True, cpu=True)\na.print(1)\n"
    constructor = "ctx = af.init_context(device_placement=True, cpu=True)"
    assert changed(before) == f"import accelfn as af\n{constructor}\naf.print_once(ctx, 1)\n"
    assert changed(before, "shim") == before.replace("accelerate", "accelfn")


def test_the_shim_keeps_the_loop() -> None:
    before = framed(STEP + "\naccelerator.print(accelerator.state.process_index)")
    after = before.replace("from accelerate", "from accelfn").replace("state.process_index", "process_index")
    assert (
        changed(before, "shim").replace("accelerator.state.process_index", "accelerator.process_index")
        == after
    )


def test_notes_say_which_numbers_change() -> None:
    window = LOOPS["a window"][0].replace("optimizer.zero", "scheduler.step()\n    optimizer.zero")
    notes = [note.text for note in plan_migration(framed(window)).notes]
    parts = ("another order", "a short last window", "once for each process")
    assert len(notes) == 3
    assert all(any(part in text for text in notes) for part in parts)
    assert ["compat=" in note.text for note in plan_migration(framed(window), to="shim").notes] == [True]


LOADERS: dict[str, tuple[str, bool]] = {
    "loader = DataLoader(data)": ("", False),
    "loader = torch.utils.data.DataLoader(data, 4, False, drop_last=True)": ("", False),
    "loader = DataLoader(data, shuffle=True)": ("loader = DataLoader", True),
    "loader = DataLoader(data, 4, True)": ("loader = DataLoader", True),
    "loader = DataLoader(data, sampler=order)": ("loader = DataLoader", True),
    "loader = DataLoader(data, **options)": ("loader = DataLoader", True),
    "other = DataLoader(data)\nloader = other": ("", False),
    "other = DataLoader(data)\nfrom data import loader": ("for batch in loader", True),
    "def make(): return DataLoader(data)\nloader, rest = make()": ("", False),
    "loader = make()": ("for batch in loader", True),
}


@pytest.mark.parametrize("made", LOADERS)
def test_an_order_is_noted_where_a_loader_may_shuffle(made: str) -> None:
    line, is_noted = LOADERS[made]
    before = framed(STEP, head=f"{made}\n")
    notes = [note for note in plan_migration(before).notes if "another order" in note.text]
    assert bool(notes) is is_noted
    assert all(before.splitlines()[note.line - 1].startswith(line) for note in notes)


def test_loaders_of_functions_are_followed() -> None:
    before = framed(STEP, head="loader = DataLoader(data)\n")
    more = "def test(rows):\n    for row in rows: accelerator.gather_for_metrics(row)\n"
    rest = "rest = accelerator.skip_first_batches(loader, 3) if a else loader\ntest(rest)\n"
    assert plan_migration(before + more + rest).notes == ()
    text = changed(before + more + rest)
    assert "rest = af.skip_first_batches(loader, 3) if a else loader\n" in text
    assert "for row, micro in af.microbatches(ctx, rows)" in text


# A function that trains with what its caller prepares: it, its call, and both afterwards.
TRAINED: dict[str, tuple[str, str, str, str]] = {
    "nothing is returned": (
        "def train(model, loader, optimizer, accelerator, epoch):",
        "train(model, loader, optimizer, accelerator, 3)",
        "def train(model, loader, optimizer, ctx, scaler, epoch):",
        "scaler = train(model, loader, optimizer, ctx, scaler, 3)",
    ),
    "by name": (
        "def train(*, loader, model, optimizer, accelerator: Accelerator):",
        "train(model=model, accelerator=accelerator, optimizer=optimizer, loader=loader)",
        "def train(*, loader, model, optimizer, ctx: af.Context, scaler):",
        "scaler = train(model=model, ctx=ctx, scaler=scaler, optimizer=optimizer, loader=loader)",
    ),
    "the accelerator is global": (
        "def train(net, loader, optimizer=None):",
        "train(model, loader, optimizer)",
        "def train(scaler, net, loader, optimizer=None):",
        "scaler = train(scaler, model, loader, optimizer)",
    ),
}


def trains(head: str, end: str, call: str) -> str:
    """Return a program whose loop is in a function."""
    loop = f"    for batch in loader:\n{textwrap.indent(STEP, ' ' * 8)}\n"
    before, _, after = framed(call, head=f"{head}\n{loop}{textwrap.indent(end, '    ')}").rpartition(
        "for batch in loader:"
    )
    return f"{before}for epoch in range(3):{after}"


@pytest.mark.parametrize("form", TRAINED)
def test_a_function_that_trains_passes_the_scaler_on(form: str) -> None:
    head, call, new_head, new_call = TRAINED[form]
    text = changed(trains(head, "", call))
    body = text[text.index("def train") : text.index("ctx = af")]
    assert body == (
        f"{new_head}\n"
        "    for batch, micro in af.microbatches(ctx, loader):\n"
        "        scaler = af.backward(ctx, model(batch), scaler, micro)\n"
        "        scaler = af.optimizer_step(ctx, optimizer, scaler)\n"
        "    return scaler\n"
    )
    assert text.endswith(f"scaler = af.init_scaler(ctx)\nfor epoch in range(3):\n    {new_call}\n")


@pytest.mark.parametrize(
    ("end", "call", "new_end", "new_call"),
    [
        ("return total\n", "loss = CALL", "return total, scaler\n", "loss, scaler = CALL"),
        ("return total\n", "CALL", "return total, scaler\n", "_, scaler = CALL"),
        ("return a, b\n", "a, b = CALL", "return (a, b), scaler\n", "(a, b), scaler = CALL"),
        ("return (a, b)\n", "(a, b) = CALL", "return (a, b), scaler\n", "(a, b), scaler = CALL"),
        (
            "if a: return\nreturn 1\n",
            "x = CALL",
            "if a: return None, scaler\n    return 1, scaler\n",
            "x, scaler = CALL",
        ),
        (
            "if a: return\nprint()\n",
            "CALL",
            "if a: return scaler\n    print()\n    return scaler\n",
            "scaler = CALL",
        ),
    ],
)
def test_what_a_function_that_trains_returns(end: str, call: str, new_end: str, new_call: str) -> None:
    head, whole, _, new_whole = TRAINED["nothing is returned"]
    text = changed(trains(head, end, call.replace("CALL", whole)))
    assert text[: text.index("ctx = af")].endswith(f"    {new_end}")
    assert text.endswith("    " + new_call.replace("CALL", new_whole.removeprefix("scaler = ")) + "\n")


# A parameter, the end of the function, and its call, with what is to be done about it.
UNTRAINED: dict[tuple[str, str, str], str] = {
    ("", "", "print(CALL())"): "of its own",
    ("", "", "x = CALL()"): "of its own",
    ("", "yield 1\n", "CALL()"): "a generator",
    ("", "if a: return 1\n", "CALL()"): "the end",
    ("", "", "CALL()\nf(train)"): "by its name",
    (", **x", "", "CALL(**a)"): "one by one",
    (", accelerator=None", "", "CALL(accelerator)"): "without a default",
    ("", "accelerator.save_state('a')\n", "CALL()"): "that prepares",
}


@pytest.mark.parametrize("form", UNTRAINED)
def test_a_function_that_trains_in_another_way_is_refused(form: tuple[str, str, str]) -> None:
    more, end, call = form
    call = call.replace("CALL(", "train(model, loader, optimizer, ").replace(", )", ")")
    found = refusals(trains(f"def train(model, loader, optimizer{more}):", end, call))
    assert any(UNTRAINED[form] in text for text in found), found


def test_statements_on_one_line_are_steps_too() -> None:
    line = "accelerator.backward(loss)\noptimizer.step(); scheduler.step(); optimizer.zero_grad()  # all\n"
    assert changed(framed(line)).endswith(
        "    scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=scheduler)  # all\n"
    )
    window = f"with accelerator.accumulate(model):\n{textwrap.indent(line, '    ')}"
    assert changed(framed(window)).endswith(
        "    if micro.sync:\n"
        "        scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=scheduler)  # all\n"
    )
    first = "optimizer.zero_grad(); total += 1\naccelerator.backward(loss)\noptimizer.step()"
    assert "    total += 1\n    scaler = af.backward" in changed(framed(first))


def test_directories_may_be_named() -> None:
    before = framed(STEP).replace("for batch", "accelerator.load_state(input_dir='a')\nfor batch")
    text = changed(before + "accelerator.save_state(output_dir='a')\n")
    assert "scaler = af.load_state(ctx, 'a', {" in text
    assert "af.save_state(ctx, 'a', {" in text


def test_logging_without_trackers_is_left_out() -> None:
    before = framed(STEP) + "accelerator.log({})\nif a:\n    accelerator.log({'a': 1})\n"
    assert changed(before).endswith("optimizer_step(ctx, optimizer, scaler)\nif a:\n    pass\n")
    assert any("never calls init_trackers" in note.text for note in plan_migration(before).notes)


# --- refusals ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "accelerator.backward(a)\naccelerator.backward(b)\n" + STEP: (
        "Add the losses",
        "8: accelerator.backward(b)",
    ),
    "x = accelerator.backward(loss)": ("Write it as a statement of its own", "7"),
    "if a:\n    accelerator.backward(loss)\noptimizer.step()": (
        "and not deeper",
        "8: accelerator.backward(loss)",
    ),
    "accelerator.backward(loss, learning_rate=1)\noptimizer.step()\noptimizer.zero_grad()": (
        "Pass the loss",
        "7",
    ),
    "accelerator.backward(loss)\noptimizer.step()": ("Step and clear a prepared optimizer", "6"),
    "accelerator.backward(loss)\nmodel.step()\nmodel.zero_grad()\noptimizer.step()\noptimizer.zero_grad()": (
        "give each optimizer a scaler state of its own",
        "10: optimizer.step()",
    ),
    "accelerator.backward(loss)\nscheduler.step()\noptimizer.step()\noptimizer.zero_grad()": (
        "Write it right after optimizer.step()",
        "8: scheduler.step()",
    ),
    "accelerator.backward(loss)\noptimizer.step()\nscheduler.step(loss)\noptimizer.zero_grad()": (
        "accelfn.scheduler_step(ctx, scheduler, metric=...)",
        "9",
    ),
    "accelerator.backward(loss)\noptimizer.zero_grad()\noptimizer.step()": (
        "clears the gradients before the step",
        "8",
    ),
    "optimizer.zero_grad()\naccelerator.backward(loss)\nif a:\n    optimizer.step()": (
        "next to optimizer.step()",
        "7",
    ),
    STEP + "\nprint(model.weight.grad)": ("Read gradients before the step", "10: model.weight.grad"),
    "accelerator.backward(loss); optimizer.step()\noptimizer.zero_grad()": ("one statement a line", "7"),
    "with accelerator.accumulate(model):\n    accelerator.backward(loss)\n    if a:\n"
    "        optimizer.step()\n    optimizer.zero_grad()": (
        "the window says when the optimizer steps",
        "10: optimizer.step()",
    ),
    "if a: continue\nwith accelerator.accumulate(model):\n" + textwrap.indent(STEP, "    "): (
        "would leave its window open",
        "7: continue",
    ),
    "with accelerator.accumulate(model):\n    accelerator.backward(loss)\n"
    "    accelerator.clip_grad_norm_(layers, 1)\n    optimizer.step()\n    optimizer.zero_grad()": (
        "Put it under `if accelerator.sync_gradients:`",
        "9: accelerator.clip_grad_norm_(layers, 1)",
    ),
    "with accelerator.no_sync(model):\n    accelerator.backward(loss)": (
        "Use accelfn.accumulate",
        "7: accelerator.no_sync",
    ),
    "rows = accelerator.gather_for_metrics(batch, use_gather_object=True)": (
        "accelfn.gather_objects_for_metrics",
        "7",
    ),
    STEP + "\nif optimizer.step_was_skipped: pass": ("accelfn.step_was_skipped(ctx, scaler)", "10"),
}


@pytest.mark.parametrize("before", REFUSED)
def test_a_loop_that_is_not_understood_is_refused(before: str) -> None:
    remedy, place = REFUSED[before]
    assert any(
        remedy in text and text.startswith(f"{place}:"[: len(place)]) for text in refusals(framed(before))
    )


REFUSED_STATEMENTS: dict[str, str] = {
    "rows = accelerator.gather_for_metrics(x)": "Use it in a `for` loop over a prepared loader",
    "if accelerator.sync_gradients: pass": "Use it in a `for` loop over a prepared loader",
    "with accelerator.accumulate(model): pass": "Use it in a `for` loop over a prepared loader",
    "accelerator.backward(loss)": "Call it in a `for` loop over a loader that was prepared",
    "accelerator.clip_grad_norm_(model.parameters(), 1)": "Clip in the loop that calls backward",
    "optimizer.step()": "Step in a loop over a prepared loader that calls backward",
    "scheduler.step(3)": "accelfn.scheduler_step(ctx, scheduler, scaler) by hand",
    "accelerator.prepare(model)": "Assign what it returns to variables",
    "a.b = accelerator.prepare(model)": "Assign what it returns to variables",
    "model = accelerator.prepare(model, device_placement=[True])": "one by one, without other arguments",
    "model = accelerator.prepare_model(model, device_placement=True)": "an option of init_context",
    "model = accelerator.prepare_model(model, True)": "Pass the object alone",
    "accelerator.save_state()": "Pass the directory alone",
    "accelerator.save_state('a', False)": "Pass the directory alone",
    "x = accelerator.load_state('a')": "Write it as a statement of its own",
    "def f(): accelerator.save_state('a')": "the function that prepares and trains",
    "accelerator.register_for_checkpointing(self.ema)": "Pass variables",
    "accelerator.init_trackers('a')": "Pass log_with to the Accelerator",
    "if a: accelerator.init_trackers('a')": "without a condition",
    "x = accelerator.log({})": "Call it in the function that calls init_trackers",
    "def f(): accelerator.init_trackers('a')\naccelerator.log({})": "that calls init_trackers",
    "if a: accelerator = Accelerator()": "It is made under a condition",
    "accelerator.get_tracker('wandb')": "Call it in the function that calls init_trackers",
    "accelerator.gradient_accumulation_steps = 3": "The context is frozen",
    "accelerator.even_batches": "no function for it that is known",
    "accelerator._models": "no function for it that is known",
    "accelerator.scaler": "The loss scale is in the scaler state",
    "accelerator.state.deepspeed_plugin": "The context has no such name",
    "accelerator.set_trigger()": "The trigger is a value",
    "with accelerator.split_between_processes(x) as y: pass": "part = accelfn.split_between_processes",
    "with accelerator.join_uneven_inputs([model]): pass": "uneven=...",
    "f(accelerator)": "The Accelerator is used as a value",
    "a = accelerator": "The Accelerator is used as a value",
    "accelerator = Accelerator()": "Make one Accelerator",
    "self.accelerator = Accelerator()": "Assign the Accelerator to a variable",
    "isinstance(a, Accelerator)": "It isn't known what it holds here",
    "def f(accelerator): accelerator.print()": "It isn't known what it holds here",
    "ctx = 3": "Rename the program's own 'ctx' first",
    "micro = 3": "Rename the program's own 'micro' first",
    "from accelerate import PartialState": "ctx = accelfn.init_context()",
    "from accelerate.utils import is_bf16_available": "Look it up in the page on names",
    "from accelerate.utils import *": "Import each name",
    "from accelerate import utils": "Import the names themselves",
    "import accelerate.utils": "on a line of its own",
    "import os, accelerate": "on a line of its own",
    "from accelerate.utils import broadcast\nbroadcast(x)": "Assign what broadcast returns",
    "from accelerate.utils import gather\nf(gather)": "its first argument is the context here",
    "from accelerate import ProjectConfiguration as P\nP('a')": "Name its arguments",
}


@pytest.mark.parametrize("statement", REFUSED_STATEMENTS)
def test_a_statement_that_is_not_understood_is_refused(statement: str) -> None:
    found = refusals(framed(STEP) + statement + "\n")
    assert any(REFUSED_STATEMENTS[statement] in text for text in found), found


REFUSED_ARGUMENTS: dict[str, str] = {
    "deepspeed_plugins={}": "Pass the same dict as deepspeed_plugin=",
    "torch_tp_plugin=a": "ParallelismConfig(tp_size=...)",
    "split_batches=True": "DataLoaderConfiguration(...)",
    "step_scheduler_with_optimizer=False": "Step the scheduler yourself",
    "nonsense=1": "no argument of Accelerate 1.15",
    "*args": "Name the arguments",
    "1, 2, 3, 4, 5, 6, 7, 8, 9": "Name the arguments",
    "gradient_accumulation_steps=2": "use accumulate in the loop",
}


@pytest.mark.parametrize("argument", REFUSED_ARGUMENTS)
def test_an_argument_that_is_not_understood_is_refused(argument: str) -> None:
    found = refusals(framed(STEP, constructor=f"Accelerator({argument})"))
    assert any(REFUSED_ARGUMENTS[argument] in text for text in found), found


def test_training_in_a_function_that_prepares_nothing_is_refused() -> None:
    function = "def train(rows):\n    for batch in rows:\n        accelerator.backward(batch)\n"
    first = refusals(framed(STEP) + function + "train(loader)\n")
    assert any("for batch in rows: Step and clear" in text for text in first), first
    outer = "def outer(loader):\n    train(loader)\nouter(loader)\n"
    second = refusals(framed(STEP) + function + outer)
    assert any("for batch in rows: Prepare the model and the loop's" in text for text in second), second


REFUSED_IN_THE_SHIM: dict[str, str] = {
    "accelerator._models": "It is private in Accelerate",
    "accelerator.scaler": "The loss scale is in the scaler state",
    "accelerator.gradient_state.num_steps": "micro.sync",
    "accelerator.state.deepspeed_plugin": "the frozen context",
    "accelerator.dataloader_config.split_batches = True": "DataLoaderConfiguration(...)",
    "from accelerate.utils import gather\ndef f(accelerator): return gather(x)": "none is known at this line",
    "from accelerate import PartialState": "ctx = accelfn.init_context()",
    "with accelerator.accumulate(model):\n    accelerator.clip_grad_norm_(a, 1)": "sync_gradients:",
}


@pytest.mark.parametrize("statement", REFUSED_IN_THE_SHIM)
def test_the_shim_refuses_what_it_lacks(statement: str) -> None:
    found = refusals(framed(STEP) + statement + "\n", "shim")
    assert any(REFUSED_IN_THE_SHIM[statement] in text for text in found), found


def test_what_is_no_python_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"train\.py:2: this Python can't parse it: .* Correct the program"
    ):
        plan_migration("x = 1\nx = = 1\n", "train.py")


# --- laws ----------------------------------------------------------------------------------------

PARTS = (
    *(framed(before) for before, _ in LOOPS.values()),
    *(framed(STEP.replace("batch", "0")).replace("for batch in loader:", head) for head in HEADS),
)


@st.composite
def programs(draw: st.DrawFn) -> str:
    source = draw(st.sampled_from(PARTS))
    lines = draw(
        st.lists(st.sampled_from(("# ä comment\n", "x = 'Ünïcode'; y = 1\n", "\n", "y = '''a\n b'''\n")))
    )
    tail = draw(
        st.lists(st.sampled_from([one for one in STATEMENTS if "skip" not in one and "free" not in one]))
    )
    source = "".join(lines) + source + "".join(f"{statement}  # ö\n" for statement in tail)
    return source.replace("\n", draw(st.sampled_from(("\n", "\r\n"))))


@given(programs(), st.sampled_from(("functions", "shim")))
def test_migrating_keeps_other_lines_parses_and_is_done_once(source: str, to: Level) -> None:
    migration = plan_migration(source, to=to)
    assert migration.refusals == ()
    after = migration.text
    ast.parse(after)
    assert not re.search(r"\baccelerate\b", after)
    assert plan_migration(after, to=to) == Migration("<program>", after, (), (), ())
    assert after.count("\r\n") == after.count("\n") * ("\r\n" in source)
    # Lines outside of all edits stand in the result, in order and byte for byte.
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    untouched = [
        source[start:end]
        for start, end in zip(starts, [*starts[1:], len(source)], strict=True)
        if not any(edit.start < end and start < max(edit.end, edit.start + 1) for edit in migration.edits)
    ]
    left = iter(after.splitlines(keepends=True))
    assert all(line in left for line in untouched if line)


@given(programs())
def test_the_diff_holds_both_programs(source: str) -> None:
    migration = plan_migration(source, "a.py")
    before, after = source.split("\n"), migration.text.split("\n")
    lines = migration.diff.split("\n")
    assert lines[:2] == ["--- a.py", "+++ a.py"]
    shown = [line for line in lines[2:] if not line.startswith("@@")]
    for sign, text in (("-", before), ("+", after)):
        side = iter(text)
        assert all(line[1:] in side for line in shown if line and line[0] in (sign, " "))
    changes = sum(line[:1] in "-+" for line in shown if line)
    assert changes == sum(line[0] in "-+" for line in difflib.ndiff(before, after))
