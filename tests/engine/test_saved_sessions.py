"""Sessions that are kept while the engine is away."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from stretto.host.saved import load_sessions, save_sessions
from stretto.protocol import GetSession, OpenSession, RequestError, RewindSession, SessionTurn
from tests.engine.small import Oracle, Run, greedy, make_core

NEW = 6


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama")


def turn(run: Run, rid: str, tokens: list[int], **order) -> list[int]:
    run.submit(rid, tokens, greedy(NEW), session=SessionTurn(mode="append", **order))
    run.finish_sessions()
    return run.ids(rid)


def engine(oracle: Oracle, file: Path, **limits) -> Run:
    core = make_core(oracle.model, page_size=4, **limits)
    core.session_file = file
    load_sessions(core.host.sessions, core.info.model_name, file)
    return Run(core)


def test_a_session_goes_on_after_a_restart(oracle: Oracle, tmp_path: Path):
    file = tmp_path / "kept" / "sessions"
    run = engine(oracle, file)
    first = [5, 9, 2, 7, *turn(run, "1", [5, 9, 2, 7], sid="s", turn_id="one")]
    second = [*first, 3, 3, *turn(run, "2", [3, 3], sid="s", turn_id="two")]
    run.core.manage(OpenSession(sid="empty", ttl=77.0, capacity=100))
    before = {info.id: info for info in run.core.manage(GetSession())[0]}
    run.core.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    run = engine(oracle, file)
    after = {info.id: info for info in run.core.manage(GetSession())[0]}
    assert after.keys() == before.keys() == {"s", "empty"} and after["empty"].ttl == 77.0
    assert (after["s"].tokens, after["s"].turns, after["s"].last_turn) == (len(second), 2, "finished")
    assert after["s"].cached_tokens == 0
    assert turn(run, "3", [8], sid="s") == oracle.answer([*second, 8], NEW)
    assert turn(run, "4", [9], sid="s", after="one") == oracle.answer([*first, 9], NEW), "turns keep their names"
    run.core.manage(RewindSession("s", 4))
    assert turn(run, "5", [9], sid="s") == oracle.answer([5, 9, 2, 7, 9], NEW)
    with pytest.raises(RequestError, match="100"):
        turn(run, "6", list(range(100)), sid="empty")
    run.core.close()


def test_live_turns_end_and_their_session_is_kept_as_it_was(oracle: Oracle, tmp_path: Path):
    run = engine(oracle, tmp_path / "sessions")
    first = [5, 9, 2, 7, *turn(run, "1", [5, 9, 2, 7], sid="s")]
    run.submit("2", [1, 1], greedy(50), session=SessionTurn(sid="s", mode="append"))
    run.step(3)
    run.note(run.core.abort("2"))  # as a loop does before it closes its core
    run.core.close()
    again = engine(oracle, tmp_path / "sessions")
    assert turn(again, "3", [4], sid="s") == oracle.answer([*first, 4], NEW)
    again.core.close()


def test_what_does_not_fit_is_left_alone(oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "sessions"
    run = engine(oracle, file)
    for sid in ("a", "b", "c"):
        turn(run, sid, [5, 9], sid=sid)
    run.core.close()
    few = engine(oracle, file, max_sessions=2)
    assert {info.id for info in few.core.manage(GetSession())[0]} == {"b", "c"}, "those used last stay"
    assert "1 of 3 sessions" in caplog.text
    load_sessions((empty := make_core(oracle.model)).host.sessions, "another model", file)
    assert len(empty.host.sessions) == 0 and "left alone" in caplog.text
    file.write_bytes(file.read_bytes()[:-3])
    load_sessions(empty.host.sessions, "tiny", file)
    assert len(empty.host.sessions) == 0 and "cannot be read" in caplog.text
    save_sessions(few.core.host.sessions, "tiny", Path("/dev/null/nowhere"))
    assert "cannot be written" in caplog.text
    for core in (few.core, empty):
        core.close()


def test_sessions_expire_while_the_engine_is_away(oracle: Oracle, tmp_path: Path):
    now = [0.0]
    run = engine(oracle, tmp_path / "sessions", clock=lambda: now[0], session_ttl=10.0)
    turn(run, "1", [5, 9], sid="s")
    now[0] = 8.0
    run.core.close()
    now[0] = 100.0  # another machine's clock
    again = engine(oracle, tmp_path / "sessions", clock=lambda: now[0], session_ttl=10.0)
    assert len(again.core.host.sessions) == 1
    now[0] = 103.0
    again.core.tick()
    assert len(again.core.host.sessions) == 0
    again.core.close()
