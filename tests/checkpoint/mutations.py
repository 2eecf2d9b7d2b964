"""Plant a bug in a copy of the package, and see that the tests which are there for it find it.

``python -m tests.checkpoint.mutations`` plants them all, one at a time, and prints a table. A bug is a change
of a text that stands exactly once in a module; with each go the tests that must fail because of it.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ("MUTATIONS", "ROOT", "Mutation", "Outcome", "plant", "run_mutations")

ROOT = Path(__file__).parents[2]
_HERE = "tests/checkpoint/"
_LONGEST_S = 300.0
# Taken into memory once, for all the runs of pytest that are forked.
_HEAVY = ("pytest", "hypothesis", "numpy", "torch", "torch.distributed", "optree", "safetensors.torch")


class Mutation(NamedTuple):
    """A bug.

    Attributes:
        name: What it is.
        module: Of ``accelfn.checkpoint``.
        tests: That find it, as pytest names them.
        changes: Pairs of what stands in the module, once, and what is to stand there instead.
    """

    name: str
    module: str
    tests: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]


class Outcome(NamedTuple):
    """What came of the tests."""

    verdict: str  # found, NOT FOUND, or what else ended them
    seconds: float


def _bug(name: str, module: str, tests: str, *texts: str) -> Mutation:
    nodes = tuple(_HERE + one for one in tests.split())
    return Mutation(name, module, nodes, tuple(zip(texts[::2], texts[1::2], strict=True)))


_POWER = "files/test_power_loss.py::test_old_or_new_is_there_whole_after_any_power_cut"
_ORDER = "state/test_save_order.py::test_a_power_cut_at_any_instant_leaves_the_old_one_or_the_new_one"
_FAULT = "state/test_faults.py::test_whatever_fails_the_old_one_stays_and_the_next_save_works"
_HARM = "state/test_bad_input.py::test_a_manifest_that_was_made_to_harm"

MUTATIONS = (
    # Durability.
    _bug(
        "tensors aren't synced",
        "files",
        f"{_ORDER}[first-1]",
        "            disk.sync(descriptor)\n",
        "            pass\n",
    ),
    _bug(
        "the manifest isn't synced",
        "disk",
        f"{_ORDER}[first-1]",
        "            disk.sync(descriptor)\n        finally",
        "            pass\n        finally",
    ),
    _bug(
        "the directory isn't synced before the swap",
        "commit",
        f"{_ORDER}[first-1] {_ORDER}[replaced-1]",
        "format_manifest(manifest))\n    with naming(save.path):\n        disk.sync_folder(save.path)\n",
        "format_manifest(manifest))\n",
    ),
    _bug(
        "the directory isn't synced after the swap",
        "commit",
        f"{_ORDER}[first-1] {_ORDER}[replaced-1]",
        "MANIFEST))\n    with naming(save.path):\n        disk.sync_folder(save.path)\n",
        "MANIFEST))\n",
    ),
    _bug(
        "new directories aren't synced",
        "disk",
        f"{_POWER}[first]",
        "            disk.sync_folder(os.path.dirname(one))\n",
        "            pass\n",
    ),
    _bug(
        "the removal of a manifest isn't synced before the files go",
        "commit",
        f"{_POWER}[prune]",
        "            disk.sync_folder(path)\n        with suppress(OSError):  # it is",
        "            pass\n        with suppress(OSError):  # it is",
    ),
    _bug(
        "files of a killed save go before the swap that it made is durable",
        "commit",
        _POWER,
        "        if unused and not is_durable:\n            disk.sync_folder(path)\n",
        "",
    ),
    # Order.
    _bug(
        "old files are deleted before the swap is durable",
        "commit",
        f"{_ORDER}[replaced-1]",
        "os.path.join(save.path, MANIFEST))\n    with naming",
        "os.path.join(save.path, MANIFEST))\n    clean(disk, save.path, is_durable=True)\n    with naming",
    ),
    _bug(
        "the old one's files are deleted when a save begins",
        "commit",
        f"{_ORDER}[replaced-1]",
        "used |= {name, *head.files, *(",
        "used |= {name, *(",
    ),
    _bug(
        "the manifest is written under its final name",
        "commit",
        f"{_ORDER}[first-1] {_ORDER}[first-2]",
        'f"manifest-{token}.json"',
        "MANIFEST",
    ),
    _bug(
        "what failed on one rank while writing is swallowed",
        "write",
        f"{_FAULT}[2-1-replaced-waiting] {_FAULT}[1-0-replaced-waiting]",
        'phases.gather("write", json.dumps(written), error)',
        'phases.gather("write", json.dumps(written))',
    ),
    _bug(
        "what failed while committing is swallowed",
        "write",
        f"{_FAULT}[2-0-replaced-waiting]",
        'phases.gather("commit", "", error)',
        'phases.gather("commit", "")',
    ),
    _bug(
        "what failed while removing older ones is told on one rank",
        "write",
        f"{_FAULT}[2-0-rotated-waiting]",
        'phases.gather("prune", "", error)',
        'phases.gather("prune", "")',
    ),
    _bug(
        "a rank that failed doesn't wait for those that still write",
        "background",
        "state/test_save_order.py::test_what_fails_on_one_rank_is_removed_when_the_others_write_no_more",
        "        every: list[Any] = []\n",
        "        every: list[Any] = []\n        if error is not None:\n            raise error\n",
    ),
    _bug(
        "the files of a save that failed stay",
        "commit",
        f"{_FAULT}[1-0-replaced-waiting]",
        "    clean(disk, save.path, keep_previous=True)\n",
        "",
    ),
    _bug(
        "older ones are removed before the commit",
        "write",
        f"{_FAULT}[1-0-rotated-waiting]",
        "            _, error = catch(lambda: commit(disk, save))\n",
        "            if job.keep is not None:\n"
        "                from accelfn.checkpoint.find import find_checkpoints\n"
        "                import shutil\n"
        "                for one in find_checkpoints(job.directory.parent)[: 1 - (job.keep.last or 1)]:\n"
        "                    shutil.rmtree(one)\n"
        "            _, error = catch(lambda: commit(disk, save))\n",
    ),
    _bug(
        "the newest is removed",
        "keep",
        "state/test_state.py::test_a_directory_of_checkpoints_gives_the_newest files/test_keep.py",
        "set(order[-max(keep.last or 1, 1) :])",
        "set(order[: max(keep.last or 1, 1)])",
    ),
    _bug(
        "what was just saved is removed",
        "keep",
        "files/test_keep.py::test_what_was_just_saved_stays_whatever_the_rules_say",
        "        stay.add(saved)\n",
        "        pass\n",
    ),
    _bug(
        "a user's files in a checkpoint are deleted when it is replaced",
        "commit",
        "files/test_commit.py::test_a_users_files_in_a_checkpoint_stay_when_it_is_replaced",
        "if is_own_name(name) and name not in used]",
        "if name not in used]",
    ),
    _bug(
        "a node keeps no old manifest until all have committed",
        "write",
        "state/test_each_node.py::test_a_kill_at_any_change_of_a_node_leaves_one_that_all_nodes_have",
        "keep_previous=each_node",
        "keep_previous=False",
    ),
    # Locks and leftovers.
    _bug(
        "the lock isn't taken",
        "commit",
        "files/test_commit.py::test_one_save_at_a_time_writes_to_a_directory",
        "            return is_new, disk.lock(path)\n",
        "            return is_new, None\n",
    ),
    _bug(
        "a checkpoint that is being replaced is removed",
        "commit",
        "files/test_keep.py::test_what_is_damaged_or_being_written_is_left_alone",
        "    except (BlockingIOError, FileNotFoundError):\n        return False",
        "    except (BlockingIOError, FileNotFoundError):\n        release = None",
    ),
    _bug(
        "a directory that a running program writes in is removed",
        "commit",
        "files/test_commit.py::"
        "test_a_directory_to_write_in_is_removed_by_the_next_program_if_its_own_was_killed",
        "    except OSError:\n        return False\n    is_copy",
        "    except OSError:\n        return True\n    is_copy",
    ),
    _bug(
        "a reader doesn't begin again after the manifest was swapped",
        "find",
        "files/test_commit.py::test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again",
        "                if now == content or attempt == _MAX_ATTEMPTS:\n",
        "                if now:\n",
    ),
    _bug(
        "a checkpoint that is removed meanwhile counts as damaged",
        "find",
        "state/test_bad_input.py::test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_not_damaged",
        "        if not unfinished or (names, unfinished) == before or attempt == _MAX_ATTEMPTS:\n",
        "        if True:\n",
    ),
    # Verification.
    _bug(
        "checksums of tensors aren't compared",
        "files",
        "state/test_bad_input.py::test_every_byte_counts",
        "if crc32 != box.piece.crc32[number]:",
        "if crc32 < 0:",
    ),
    _bug(
        "the checksum of the header isn't compared",
        "files",
        "state/test_bad_input.py::test_every_byte_counts",
        "if not whole or zlib.crc32(head) != stored.header_crc32:",
        "if not whole:",
    ),
    _bug(
        "the checksum of the manifest isn't compared",
        "manifest",
        "state/test_bad_input.py::test_every_byte_counts",
        'if rest != hashlib.sha256(line).hexdigest().encode() + b"\\n":',
        "if len(rest) != 65:",
    ),
    _bug(
        "files that the manifest doesn't name are ignored",
        "find",
        "state/test_bad_input.py::test_a_file_that_is_missing_and_one_too_many",
        "    if extra:\n",
        "    if extra and False:\n",
    ),
    _bug(
        "links are followed",
        "disk",
        "state/test_bad_input.py::test_something_else_than_a_file",
        ' | getattr(os, "O_NOFOLLOW", 0)\n    if not',
        "\n    if not",
    ),
    _bug(
        "a named pipe is waited for",
        "disk",
        "state/test_bad_input.py::test_something_else_than_a_file",
        'if status.kind != "file":',
        'if status.kind == "link":',
    ),
    _bug(
        "boxes may overlap",
        "manifest",
        "state/test_bad_input.py::test_pieces_that_overlap_leave_no_memory_of_others_to_be_read",
        'raise _unsound(place, f"pieces of tensor {name!r} overlap")',
        "continue",
    ),
    _bug(
        "any name of a file will do",
        "manifest",
        _HARM,
        "if not _FILE_NAME.fullmatch(name) or name == MANIFEST:",
        "if name == MANIFEST:",
    ),
    # Loading: all or nothing.
    _bug(
        "parameters are written into before all ranks have agreed",
        "restore",
        "state/test_save_order.py::test_nothing_is_written_into_before_all_ranks_have_agreed",
        '        phases.gather("restore", "", error)\n',
        '        for write in writes:\n            write()\n        phases.gather("restore", "", error)\n',
    ),
    _bug(
        "the random state is restored before all ranks have agreed",
        "restore",
        "state/test_save_order.py::test_nothing_is_written_into_before_all_ranks_have_agreed",
        "    undo: list[Callable[[], None]] = []\n    may_refuse",
        "    _restore_random(ctx, read)\n    undo: list[Callable[[], None]] = []\n    may_refuse",
    ),
    _bug(
        "modules are written into before what may refuse was asked",
        "restore",
        "state/test_save_order.py::test_nothing_is_written_into_before_all_ranks_have_agreed",
        "    may_refuse = [one for one in pending if not cannot_fail(one)]\n",
        "    may_refuse = [one for one in pending if not cannot_fail(one)]\n"
        "    for one in pending:\n        if cannot_fail(one):\n            restore_object(one, names)\n",
    ),
    _bug(
        "objects that took up their state keep it when another refuses",
        "restore",
        "state/test_state.py::test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were",
        "            step()\n        raise",
        "            pass\n        raise",
    ),
    # What is kept.
    _bug(
        "the same tensor is stored twice",
        "document/encode",
        "state/test_save_order.py::test_the_same_tensor_comes_back_as_one_and_lies_there_once",
        "        known = self._names.get(key)\n",
        "        known = None\n",
    ),
    _bug(
        "strides are forgotten",
        "document/encode",
        "state/test_save_order.py::test_the_same_tensor_comes_back_as_one_and_lies_there_once",
        '            node["stride"] = stride\n',
        "            pass\n",
    ),
    _bug(
        "every rank gets the values of rank 0",
        "by_rank",
        "state/test_state.py::test_a_tensor_that_is_equal_everywhere_is_written_once_and_others_are_kept",
        "number = of[rank % len(of)]",
        "number = of[0]",
    ),
    _bug(
        "of tensors that differ between ranks one is kept",
        "collect",
        "state/test_state.py::test_a_tensor_that_is_equal_everywhere_is_written_once_and_others_are_kept",
        'found[name] = "crc32:" + ",".join(map(str, sums[name]))',
        'found[name] = "crc32:"',
    ),
    _bug(
        "states of an optimizer go by number instead of by name",
        "objects",
        "state/test_state.py::test_neither_the_order_of_objects_nor_of_parameters_matters",
        '    for name, value in cast("Mapping[Any, Any]", state["state"]).items():\n',
        '    for place, (name, value) in enumerate(cast("Mapping[Any, Any]", state["state"]).items()):\n',
        "values[name if number is None else number] = own",
        "values[name if number is None else place] = own",
    ),
    _bug(
        "in the background the state goes on changing",
        "background",
        "state/test_state.py::test_in_the_background_the_state_of_the_moment_is_saved",
        "        return [*self._copies]\n",
        "        return [tensor.detach().contiguous() for tensor in tensors]\n",
    ),
    _bug(
        "nobody is told what went wrong in the background",
        "background",
        "state/test_state.py::test_an_error_in_the_background_is_told_by_the_handle_or_at_the_next_save "
        f"{_FAULT}[1-0-replaced-background]",
        "        if error is not None and not is_reported:\n",
        "        if False:\n",
    ),
)


def plant(mutation: Mutation, package: Path) -> None:
    """Change a copy of the package.

    Args:
        mutation: The bug.
        package: Directory ``accelfn`` of the copy.

    Raises:
        ValueError: A text stands there not at all, or more than once.
    """
    file = package / "checkpoint" / f"{mutation.module}.py"
    text = file.read_text()
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.name!r}: {text.count(old)} times in {file.name}: {old!r}")
        text = text.replace(old, new)
    file.write_text(text)


def run_mutations(mutations: Sequence[Mutation]) -> list[Outcome]:
    """Plant bugs one at a time and run their tests, each in a process forked from this one.

    Nothing of accelfn may have been imported here.
    """
    assert "accelfn" not in sys.modules
    for name in _HEAVY:
        importlib.import_module(name)
    return [_run(one) for one in mutations]


def _run(mutation: Mutation) -> Outcome:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("accelfn", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        plant(mutation, copy / "accelfn")
        code = _forked(mutation.tests, copy)
        if code not in (0, 1) or (code and not mutation.changes):
            print((copy / "said.txt").read_text(errors="replace"), file=sys.stderr)
        verdict = {0: "NOT FOUND", 1: "found"}.get(code, f"pytest ended with {code}")
    return Outcome(verdict, time.monotonic() - start)


def _forked(tests: Sequence[str], folder: Path) -> int:
    """Run pytest in a fork, and give its exit status; -1 where it takes too long."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            said = os.open(folder / "said.txt", os.O_RDWR | os.O_CREAT)
            for descriptor in range(3):
                os.dup2(said, descriptor)
            os.chdir(folder)
            sys.path[:] = [str(folder), *(one for one in sys.path if one not in ("", str(ROOT)))]
            for name in [one for one in sys.modules if one.partition(".")[0] == "tests"]:
                del sys.modules[name]
            options = (
                "-x",
                "-q",
                "--assert=plain",
                "-p",
                "no:cacheprovider",
                "--no-header",
                f"--rootdir={folder}",
            )
            code = int(importlib.import_module("pytest").main([*options, *tests]))
        except BaseException:  # noqa: BLE001 -- the fork ends here, whatever happens
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + _LONGEST_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return -1


def main() -> None:
    """Plant all bugs, print a table, and fail where one wasn't found."""
    parser = argparse.ArgumentParser(description="Plant bugs, and see whether the tests find them.")
    parser.add_argument("--only", default="", help="those with this text in their name or module")
    parser.add_argument("--bugs-only", action="store_true", help="don't try first that the tests pass")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if options.only in f"{one.module}: {one.name}"]
    outcomes: list[Outcome] = []
    every = tuple(dict.fromkeys(node for one in chosen for node in one.tests))
    nothing = Mutation("nothing", "save", every, ())
    if not options.bugs_only and run_mutations([nothing])[0].verdict != "NOT FOUND":
        sys.exit("Without any bug these tests must pass, and they don't.")
    print("| module | bug | | s |", "| --- | --- | --- | --- |", sep="\n")
    for one in chosen:
        outcomes += run_mutations([one])
        print(
            f"| {one.module} | {one.name} | {outcomes[-1].verdict} | {outcomes[-1].seconds:.1f} |", flush=True
        )
    found = sum(one.verdict == "found" for one in outcomes)
    print(f"\n{found} of {len(chosen)} bugs were found.")
    sys.exit(found != len(chosen))


if __name__ == "__main__":
    main()
