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

ROOT = Path(__file__).parents[2]
_HERE = "tests/checkpoint/"
_LONGEST_S = 300.0
# Taken into memory once, for all the runs of pytest that are forked.
_HEAVY = (
    *("pytest", "hypothesis", "numpy", "torch", "torch.distributed", "optree", "safetensors.torch"),
    *("torch.distributed.algorithms.ddp_comm_hooks", "torch.utils.flop_counter", "torch._dynamo"),
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
)


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


_SHORT = {
    "POWER": "files/test_power_loss.py::test_old_or_new_is_there_whole_after_any_power_cut",
    "FAULT": "state/test_faults.py::test_whatever_fails_the_old_one_stays_and_the_next_save_works",
    "HARM": "state/test_bad_input.py::test_a_manifest_that_was_made_to_harm",
}
# Bugs for tests that search, of which nobody sees otherwise whether they can fail. For each bug its module
# and name, the tests, and what goes and comes, as in a diff. test_power_loss leaves out each sync by itself.
_BUGS = r"""
= commit: old files are deleted before the swap is durable
@ POWER[replacing]
-    disk.rename(temporary, place)
-    with naming
+    disk.rename(temporary, place)
+    clean(disk, save, manifest)
+    with naming
= commit: the old one's files are deleted when a save begins
@ POWER[replacing]
-(MANIFEST, *head.files, *(
+(MANIFEST, *(
= write: what failed on one rank while writing is swallowed
@ FAULT[2-1-replaced-waiting]
@ FAULT[1-0-replaced-waiting]
-phases.gather("write", json.dumps(written), error)
+phases.gather("write", json.dumps(written))
= write: what failed while removing older ones is told on one rank
@ FAULT[2-0-rotated-waiting]
-phases.gather("prune", "", error)
+phases.gather("prune", "")
= commit: the files of a save that failed stay
@ FAULT[1-0-replaced-waiting]
-    clean(disk, save)
-    if save.is_new
+    if save.is_new
= write: older ones are removed before the commit
@ FAULT[1-0-rotated-waiting]
-    commit(disk, save, manifest)
+    if job.keep is not None:
+        from accelfn.checkpoint.find import find_checkpoints
+        import shutil
+        for path in find_checkpoints(job.directory.parent)[: 1 - (job.keep.last or 1)]:
+            shutil.rmtree(path)
+    commit(disk, save, manifest)
= read: checksums of tensors aren't compared
@ state/test_bad_input.py::test_every_byte_counts
-if crc32 != file.sums[file.first[chunk.box.key] + chunk.number]:
+if crc32 < 0:
= read: the checksum of the checksums isn't compared
@ state/test_bad_input.py::test_a_file_of_another_checkpoint_of_the_same_shapes[tensors-00000.safetensors]
-if not whole or zlib.crc32(sums) != stored.sums_crc32:
+if not whole:
= read: the checksum of the header isn't compared
@ state/test_bad_input.py::test_every_byte_counts
-if not whole or zlib.crc32(head) != stored.header_crc32:
+if not whole:
= manifest: the checksum of the manifest isn't compared
@ state/test_bad_input.py::test_every_byte_counts
-if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
+if len(rest) != 65:
= manifest: any name of a file will do
@ HARM
-if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
+if name == MANIFEST:
= restore: parameters are written into before all ranks have agreed
@ state/test_state.py::test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were
-        phases.gather("restore", "", error)
+        for write in writes:
+            write()
+        phases.gather("restore", "", error)
= background: nobody is told what went wrong in the background
@ state/test_background.py::test_an_error_is_told_by_the_handle_or_on_all_ranks_by_the_next_call
@ FAULT[1-0-replaced-background]
-        if error is not None and not is_reported:
+        if False:
"""


def _parse(text: str) -> Mutation:
    title, *lines = text.splitlines()
    module, _, name = title.partition(": ")
    tests: list[str] = []
    hunks: list[tuple[list[str], list[str]]] = []
    for line in lines:
        if line[0] == "@":
            short, bracket, rest = line[2:].partition("[")
            tests.append(f"{_HERE}{_SHORT.get(short, short)}{bracket}{rest}")
            continue
        if line[0] == "-" and (not hunks or hunks[-1][1]):
            hunks.append(([], []))
        hunks[-1][line[0] == "+"].append(line[1:])
    changes = ("\n".join(old) + "\n" * (not new) for old, new in hunks), ("\n".join(new) for _, new in hunks)
    return Mutation(name, module, tuple(tests), tuple(zip(*changes, strict=True)))


MUTATIONS = tuple(map(_parse, _BUGS.removeprefix("\n= ").split("\n= ")))


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


def verdict_of(mutation: Mutation) -> str:
    """Plant a bug and run its tests, in a process forked from this one, which must not know accelfn."""
    assert "accelfn" not in sys.modules
    for name in _HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("accelfn", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        plant(mutation, copy / "accelfn")
        code = _forked(mutation.tests, copy)
        if code not in (0, 1) or (code and not mutation.changes):
            print((copy / "said.txt").read_text(errors="replace"), file=sys.stderr)
    return {0: "NOT FOUND", 1: "found"}.get(code, f"pytest ended with {code}")


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
            sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
            options = ("-xq", "-m=", "--assert=plain", "-pno:cacheprovider", f"--rootdir={folder}")
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
    chosen = [bug for bug in MUTATIONS if options.only in f"{bug.module}: {bug.name}"]
    every = tuple(dict.fromkeys(node for bug in chosen for node in bug.tests))
    if not options.bugs_only and verdict_of(Mutation("nothing", "save", every, ())) != "NOT FOUND":
        sys.exit("Without any bug these tests must pass, and they don't.")
    print("| module | bug | | s |", "| --- | --- | --- | --- |", sep="\n")
    verdicts: list[str] = []
    for bug in chosen:
        start = time.monotonic()
        verdicts.append(verdict_of(bug))
        row = (bug.module, bug.name, verdicts[-1], f"{time.monotonic() - start:.1f}")
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\n{verdicts.count('found')} of {len(chosen)} bugs were found.")
    sys.exit(verdicts.count("found") != len(chosen))


if __name__ == "__main__":
    main()
