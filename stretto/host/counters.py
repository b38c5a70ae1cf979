"""What happened, so that a test or an operator can prove that it did. All monotone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    requests: int = 0
    turns: int = 0  # turns that ended, in whatever way
    steps: int = 0  # planned
    mixed_steps: int = 0  # with both a prompt's chunk and a decode row
    chunk_rows: int = 0
    chunk_tokens: int = 0
    decode_rows: int = 0
    tail_rows: int = 0  # decode rows of mixed steps
    tail_tokens: int = 0
    planned_tokens: int = 0
    fed_tokens: int = 0  # of every row, by what it was for: the three that follow
    prefill_tokens: int = 0  # ids that others had given: of prompts, and of turns that came back
    decode_tokens: int = 0  # one each of rows that sampled without drafts
    verify_tokens: int = 0  # of rows with drafts: the last id and its drafts
    prefill_rows: int = 0  # rows of results, by the same rule
    plain_rows: int = 0
    verify_rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    retractions: int = 0
    reclaimed: int = 0  # leases of idle sessions and waiting turns that were taken
    stale_results: int = 0  # rows whose turn had left its slot
    host_stops: int = 0  # turns ended by a stop string, with or without a step in flight
    aborts: int = 0
    masked_steps: int = 0  # with a grammar's row that samples
    masked_positions: int = 0  # that a mask was needed for
    masks_reused: int = 0  # of them, those whose mask had been made for another position
    grammar_ends: int = 0  # turns that a grammar ended
    grammar_errors: int = 0  # turns whose grammar could not be compiled, or led into a dead end
    grammars_crowded: int = 0  # turns whose grammar waited too long for others that were compiled before it
    processor_steps: int = 0  # with a row whose request has logit processors of its own
    processor_errors: int = 0  # turns that one of those failed
    forks: int = 0
    forks_without_pages: int = 0
    host_drafts: int = 0
    forced_drafts: int = 0  # of them, what a grammar forces
    pool_bound: int = 0  # turns that ended because the KV cache holds no more of them
    session_turns: int = 0
    in_place_turns: int = 0
    branches: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    sessions_expired: int = 0  # of them, those that were idle for too long
    sessions_displaced: int = 0  # of them, those that made room for a new one
    sessions_busy: int = 0  # turns refused because one was live
    turns_beside: int = 0  # that ran without their session, which was busy
    turns_rolled_back: int = 0  # of sessions
    turns_kept: int = 0  # aborted, but what was received stays
    recomputed_tokens: int = 0  # of sessions' histories and of retracted turns, whose KV had gone
    faults: int = 0  # requests ended by a failed check, of engines that serve on
    broken_books: int = 0  # steps after which the pages did not add up

    drafts: dict[tuple[int, int], int] = field(default_factory=dict)  # rows with drafts, by (verified, accepted)

    def note_drafts(self, verified: int, accepted: int) -> None:
        """Of one row."""
        if verified:
            key = verified, accepted
            self.drafts[key] = self.drafts.get(key, 0) + 1

    def as_dict(self) -> dict[str, float]:
        """By name. Of drafts, by place in the draft: `drafted_at.0`, `drafted_at.1` and so on, how many were verified,
        and `accepted_at`, of them; `accepted_runs.n`: in how many rows with drafts n of them were accepted."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "drafts"}
        widest = max((verified for verified, _ in self.drafts), default=0)
        longest = max((accepted for _, accepted in self.drafts), default=-1)
        for place in range(widest):
            values[f"drafted_at.{place}"] = sum(n for (verified, _), n in self.drafts.items() if verified > place)
            values[f"accepted_at.{place}"] = sum(n for (_, accepted), n in self.drafts.items() if accepted > place)
        for run in range(longest + 1):
            values[f"accepted_runs.{run}"] = sum(n for (_, accepted), n in self.drafts.items() if accepted == run)
        return values
