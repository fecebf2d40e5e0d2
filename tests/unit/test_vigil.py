"""A19, C8: when a rank that stands still counts as lost."""

from __future__ import annotations

import pytest

from shardwise.comm import vigil
from shardwise.comm.agreement import Call, Kind
from shardwise.comm.underway import Waiting
from shardwise.errors import ConfigurationError, PeerError


class _World:
    """A clock, and what a look finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.states = 0.0, dict[int, str]()
        monkeypatch.setattr(vigil, "absent", lambda ranks: {r: s for r, s in self.states.items() if r in ranks})
        monkeypatch.setattr(vigil.time, "monotonic", lambda: self.now)

    def lost(self, signs: vigil.Signs, seconds: float) -> dict[int, str]:
        """What the last of the looks says that are made in each of the next ``seconds``."""
        end, found = self.now + seconds, dict[int, str]()
        while self.now < end:
            self.now += 1
            found = signs.lost([1, 2], 15.0)
        return found


def test_A19_a_rank_is_lost_when_every_look_found_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    signs = vigil.Signs()
    world.states = {1: "is stopped"}
    assert world.lost(signs, 10) == {}
    assert world.lost(signs, 3) == {1: "is stopped (for 12.0 s)"}
    world.states = {}
    assert world.lost(signs, 1) == {}
    world.states = {1: "is stopped"}  # it went on in between
    assert world.lost(signs, 11) == {}


def test_A19_who_was_away_itself_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stopped all ranks, and this one runs again before the other."""
    world = _World(monkeypatch)
    signs = vigil.Signs()
    world.states = {1: "is stopped"}
    assert world.lost(signs, 5) == {}
    world.now += 1000
    assert world.lost(signs, 11) == {}
    assert world.lost(signs, 2) == {1: "is stopped (for 12.0 s)"}


def test_A19_a_rank_on_another_host_is_lost_when_its_beat_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """One beat between two looks is enough; one that cannot be heard is as good as none."""
    world, number = _World(monkeypatch), [0]
    monkeypatch.setattr(vigil.Beats, "heard", lambda ranks: {2: f"{number[0]} forward of 'layers.3'"})
    signs = vigil.Signs()
    for _ in range(20):
        number[0] += 1
        assert world.lost(signs, 2) == {}
    assert world.lost(signs, 9) == {}
    monkeypatch.setattr(vigil.Beats, "heard", lambda ranks: {2: ""})
    assert world.lost(signs, 3) == {2: "gave no sign of life (for 12.0 s)"}
    assert signs.last_beats([2]) == "; its last sign: forward of 'layers.3'"


def test_A19_the_error_says_what_the_rank_did_last(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    world.states = {1: "is stopped"}
    wait = Waiting(Call(Kind.GATHER, 4), "layers.{}".format, (0, 1), after=Call(Kind.REDUCE_SCATTER, 3))
    with pytest.raises(PeerError, match=r"^shardwise: rank 1 is stopped \(for 11\.2 s\) during gather of 'layers\.4' "
                                        r"in the group of ranks 0, 1; it came last to reduce-scatter of 'layers\.3'; "
                                        "SHARDWISE_LOST_AFTER=0 would go on waiting"):
        while True:
            world.now = wait.next_look
            vigil.look(wait)
    assert 12 < world.now <= 15


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_A19_the_limit_is_a_number_of_seconds_or_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _World(monkeypatch)
    world.states = {1: "is stopped"}
    monkeypatch.setenv("SHARDWISE_LOST_AFTER", "0")
    wait = Waiting(Call(Kind.BARRIER), None, (0, 1))
    for _ in range(100):
        world.now = wait.next_look
        vigil.look(wait)
    monkeypatch.setenv("SHARDWISE_LOST_AFTER", value)
    with pytest.raises(ConfigurationError, match="SHARDWISE_LOST_AFTER is not a number of seconds"):
        vigil.look(wait)
