"""Two experiments in one process, and what Ray's metrics endpoint says of them: ``exporting.py <directory>``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

import dray
from dray.desk.messages import Message, ReportReceived
from tests.ray.harness import TRIALS, Meanwhile, recorded, wait_for
from tests.ray.scraping import Sample, scraped, values

ALONE, FAULTY = "alone", "faulty"
ONE_SLOT = {"slot": "cpu", "max_slots": 1}
STATES = {
    ALONE: {"COMPLETED": 1},
    FAULTY: {"COMPLETED": 3, "ERRORED": 1, "INVALID_HP": 1},  # see `recorded.Faulty`; trial 2 is replaced
}
FOUND = "found.json"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the experiments have exported.

    Attributes:
        during: scraped while the only trial of the first one trained.
        after: scraped after the second one's end.
        reports: how many reports the first one's driver has received.
    """

    during: list[Sample]
    after: list[Sample]
    reports: int

    @staticmethod
    def read(found: dict[str, Any]) -> Found:
        during, after = ([Sample(**each) for each in found[when]] for when in ("during", "after"))
        return Found(during=during, after=after, reports=found["reports"])


def main(directory: Path) -> Found:
    during: list[Sample] = []
    messages: list[Message] = []

    def run(name: str, trial: str, hparams: dict[str, Any] | None = None, **fields: Any) -> None:
        config = recorded(directory / f"{name}.record", resources=ONE_SLOT, **fields)
        config["hyperparameters"] |= hparams or {}
        experiment = dray.Experiment(
            config | {"entrypoint": f"recorded:{trial}"}, model_dir=TRIALS, path=directory / name
        )
        experiment.run(on_message=messages.append if name == ALONE else None)

    def look() -> None:
        def busy() -> list[Sample] | None:
            now = scraped()
            return now if values(now, "dray_slots_busy", ALONE) else None

        during.extend(wait_for(busy, "a busy slot at the endpoint") or [])
        until.touch()

    until = directory / "until"
    asha = {
        "name": "asha",
        "metric": "error",
        "max_length": {"batches": 40},
        "max_trials": 1,
        "num_rungs": 3,
        "divisor": 2,
    }
    with Meanwhile(look):
        held = {"until": str(until), "longer": str(until)}
        run(ALONE, "Held", held, trials=1, batches=40, searcher=asha)
    run(FAULTY, "Faulty", trials=4, batches=20)
    reports = sum(isinstance(message, ReportReceived) for message in messages)

    def ended() -> list[Sample] | None:
        now = scraped()
        return now if values(now, "dray_trials", FAULTY) == STATES[FAULTY] else None

    after = wait_for(ended, "the second experiment's end at the endpoint")
    assert after is not None
    return Found(during=during, after=after, reports=reports)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    place = Path(sys.argv[1])
    (place / FOUND).write_text(json.dumps(asdict(main(place))))
    ray.shutdown()
