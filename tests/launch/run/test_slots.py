"""The slots of elastic training are all ranks, each once; silence is time in which one could listen."""

from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import detect_environment
from accelfn.launch.run.slots import LISTEN_S, Silence, listen, plan_slots, plan_variables


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_every_rank_has_one_slot_that_init_context_understands(
    num_machines: int, local_size: int, attempt: int
) -> None:
    slots = [
        slot for machine in range(num_machines) for slot in plan_slots(num_machines, local_size, machine)
    ]
    assert [slot.rank for slot in slots] == [*range(num_machines * local_size)]
    for slot in slots:
        variables = plan_variables(slot, attempt=attempt, max_restarts=3, host="node0", port=29400)
        place = detect_environment(variables)
        assert (place.launcher, place.rank, place.size) == ("torchrun", slot.rank, len(slots))
        assert (place.node_rank, place.num_nodes) == (slot.machine_rank, num_machines)
        assert (place.local_rank, place.local_size) == (slot.rank % local_size, local_size)
        assert (place.master_addr, place.master_port) == ("node0", 29400)
        assert variables["TORCHELASTIC_RESTART_COUNT"] == str(attempt)


def test_an_address_has_brackets_beside_a_port() -> None:
    (slot,) = plan_slots(1, 1, 0)
    variables = plan_variables(slot, attempt=0, max_restarts=0, host="fe80::1", port=7)
    assert (variables["ACCELFN_ELASTIC_STORE"], variables["MASTER_ADDR"]) == ("[fe80::1]:7", "fe80::1")


@given(st.lists(st.tuples(st.sampled_from([None, "1", "2"]), st.floats(0, 100)), max_size=30))
def test_silence_is_the_time_since_the_last_change(looks: list[tuple[str | None, float]]) -> None:
    silence = Silence()
    for index, (beat, elapsed_s) in enumerate(looks):
        before, silence = silence, listen(silence, beat, elapsed_s)
        heard = [looks[at][0] for at in range(index + 1)]
        changed = beat is None or len(heard) < 2 or heard[-2] != beat
        assert silence.beat == beat
        assert silence.seconds == (0 if changed else before.seconds + min(elapsed_s, 2 * LISTEN_S))
