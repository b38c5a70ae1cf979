"""Sessions on disk while the engine is away: what they remember, without their KV, which is computed again.

Written when the engine is stopped in an orderly way, read when it starts. A file of another model is left alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from stretto.host.history import History, Past
from stretto.host.session import Session, Sessions

logger = logging.getLogger(__name__)


class SavedTurn(msgspec.Struct, array_like=True):
    """A `Past`; `after` is its predecessor's place in the list, -1 where there is none."""

    after: int
    kept: int
    ids: list[int]
    prompt: int


class SavedSession(msgspec.Struct):
    sid: str
    cache_salt: str
    ttl: float
    capacity: int | None
    idle: float  # seconds, when it was saved
    tokens: list[int]
    prompt: int
    head: int  # place of its last turn in `turns`; -1: none
    named: dict[str, int]
    turns: list[SavedTurn]
    keeps: bool
    count: int
    last_turn: str


class SavedSessions(msgspec.Struct):
    model: str  # whose ids these are
    sessions: list[SavedSession]


def save_sessions(sessions: Sessions, model: str, path: Path) -> None:
    """Idle sessions, those used last at the end. The file is replaced as a whole, readable by its owner alone. What
    goes wrong is logged: a stop is not held up by it."""
    kept = [session for session in sessions if session.turn is None and "\0" not in session.cache_salt]
    content = SavedSessions(model, [_saved(session, sessions.now()) for session in kept])
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(content))
        part.replace(path)
    except OSError as e:
        logger.error("the sessions are not kept: %s cannot be written (%s)", path, e)
    else:
        logger.info("%d sessions are kept in %s; %d of LoRA adapters are not", len(kept), path,
                    len(sessions) - len(kept))


def load_sessions(sessions: Sessions, model: str, path: Path) -> None:
    """Those of the file that have not expired since."""
    if not path.exists():
        return
    try:
        found = msgspec.msgpack.decode(path.read_bytes(), type=SavedSessions)
        if found.model != model:
            logger.warning("the sessions in %s are of %s, not of %s: they are left alone", path, found.model, model)
            return
        made = [_session(stored, sessions.now()) for stored in found.sessions]
    except (OSError, msgspec.DecodeError, IndexError) as e:
        logger.error("no session comes back: %s cannot be read (%s)", path, e)
        return
    kept = made[len(made) - min(len(made), sessions.room):]  # those used last
    for session in kept:
        sessions.take_back(session)
    if len(kept) < len(made):
        logger.warning("%d of %d sessions in %s are lost: there is room for %d (--max-sessions)",
                       len(made) - len(kept), len(made), path, len(kept))
    logger.info("%d sessions are back from %s", len(kept), path)


def _saved(session: Session, now: float) -> SavedSession:
    history = session.history
    places: dict[Past, int] = {}
    for past in (*history.named.values(), *([history.head] if history.head else [])):
        for older in reversed([*past.line()]):
            places.setdefault(older, len(places))
    turns = [SavedTurn(places[p.after] if p.after else -1, p.kept, p.ids, p.prompt) for p in places]
    return SavedSession(session.sid, session.cache_salt, session.ttl, session.capacity, now - session.used,
                        history.tokens, history.prompt, places[history.head] if history.head else -1,
                        {name: places[past] for name, past in history.named.items()}, turns, session.keeps,
                        session.turns, session.last_turn)


def _session(stored: SavedSession, now: float) -> Session:
    """Raises IndexError where places are out of order."""
    turns: list[Past] = []
    for turn in stored.turns:
        turns.append(Past(_at(turns, turn.after), turn.kept, turn.ids, turn.prompt))
    named = {name: turns[place] for name, place in stored.named.items()}
    history = History(stored.tokens, stored.prompt, _at(turns, stored.head), named)
    return Session(stored.sid, stored.cache_salt, stored.ttl, stored.capacity, now - stored.idle, history,
                   keeps=stored.keeps, turns=stored.count, last_turn=stored.last_turn)


def _at(turns: list[Past], place: int) -> Past | None:
    return None if place < 0 else turns[place]
