"""What `pause` means for one replica: jobs in flight, and those that come while it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.errors import NotReadyError, TransferTimeout, WeightSyncError
from weightsync.serve.engine_messages import Job, PauseMode
from weightsync.serve.scheduling import Owner

PAUSE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Late:
    owner: Owner
    job: Job
    since: float


Answer = Callable[[WeightSyncError | None], None]


class PauseController:
    """Holds generation between `pause` and `resume`.

    keep: no step begins, and jobs go on at `resume`. wait: jobs that are there finish first. abort:
    they end with what they have. Jobs that come later wait in every mode, at most `timeout_s`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = PAUSE_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mode: PauseMode | None = None
        self._timeout_s = timeout_s
        self._clock = clock
        self._late: list[_Late] = []
        self._drained: list[tuple[float, Answer]] = []

    @property
    def may_step(self) -> bool:
        """Whether jobs that are there go on."""
        return self.mode != "keep"

    @property
    def late(self) -> int:
        """Jobs that came during the pause."""
        return len(self._late)

    def pause(self, mode: PauseMode, answer: Answer) -> None:
        """Begin a pause, or change its mode; `answer` is called once jobs in flight are settled.

        With `keep` that is at once, also for those who waited: jobs do not end any more.
        """
        self.mode = mode
        if mode == "keep":
            self._answer_all()
            answer(None)
        else:
            self._drained.append((self._clock() + self._timeout_s, answer))

    def resume(self) -> list[tuple[Owner, Job]]:
        """End the pause, if there is one; return the jobs that waited for it.

        Who still waited for jobs to end is told that they did not.
        """
        self.mode = None
        drained, self._drained = self._drained, []
        for _, answer in drained:
            answer(NotReadyError("generation was resumed before all jobs had ended", state="READY"))
        late, self._late = self._late, []
        return [(waiting.owner, waiting.job) for waiting in late]

    def postpone(self, owner: Owner, job: Job) -> None:
        """Keep a job that came during a pause."""
        self._late.append(_Late(owner, job, self._clock()))

    def cancel(self, owner: Owner, request_id: str) -> None:
        """Forget a job that waits for the end of the pause."""
        self._late = [w for w in self._late if (w.owner, w.job.request_id) != (owner, request_id)]

    def look(self, in_flight: int) -> list[tuple[Owner, Job]]:
        """Answer pauses for which nothing is left in flight; return jobs that waited too long."""
        if not in_flight:
            self._answer_all()
        now = self._clock()
        for deadline, answer in self._drained:
            if now > deadline:
                answer(
                    TransferTimeout(
                        f"{in_flight} requests did not end within {self._timeout_s:g} s; "
                        "generation stays paused, pause with mode abort or resume"
                    )
                )
        self._drained = [
            (deadline, answer) for deadline, answer in self._drained if now <= deadline
        ]
        overdue = [w for w in self._late if now - w.since > self._timeout_s]
        self._late = [w for w in self._late if now - w.since <= self._timeout_s]
        return [(waiting.owner, waiting.job) for waiting in overdue]

    def too_long(self) -> NotReadyError:
        """What is said to jobs that waited too long."""
        return NotReadyError(
            f"generation has been paused for over {self._timeout_s:g} s; call resume",
            state="PAUSED",
        )

    def _answer_all(self) -> None:
        drained, self._drained = self._drained, []
        for _, answer in drained:
            answer(None)
