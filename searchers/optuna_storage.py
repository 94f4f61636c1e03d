"""A storage for Optuna's samplers, which holds just the trials that it is given for one ask."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState


@dataclass(slots=True, kw_only=True)
class SamplerTrial:
    """What a sampler knows of a trial.

    Attributes:
        params: By their names in Optuna.
        notes: The sampler's own, in Optuna's `system_attrs`.
        last: The last value reported; +inf if it was not finite.
        step: The length at which that was.
    """

    params: dict[str, Any]
    notes: dict[str, Any] = field(default_factory=dict)
    last: float | None = None
    step: float = 0


class AskStorage(BaseStorage):
    """One study: the trials of `history`, and `current`, the one that is being asked for.

    Optuna's own in-memory storage can't forget trials, and copies them. A sampler's notes (`study_notes`, and the
    current trial's `system_attrs`) last until the next ask, unless they are taken out.
    """

    def __init__(self) -> None:
        self.history: list[FrozenTrial] = []
        self.current = frozen(0, SamplerTrial(params={}), TrialState.RUNNING, distributions={})
        self.study_notes: dict[str, Any] = {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = [*self.history, self.current]
        return trials if states is None else [trial for trial in trials if trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        if trial_id == self.current._trial_id:
            return self.current
        return next(trial for trial in self.history if trial._trial_id == trial_id)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        return self.current._trial_id

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """Not kept: the `optuna.Trial` has its own."""

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.get_trial(trial_id).system_attrs[key] = value

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self.study_notes

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self.study_notes[key] = value

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [StudyDirection.MINIMIZE]

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        return "search"

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return {}

    def get_all_studies(self) -> list[FrozenStudy]:
        raise NotImplementedError

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        raise NotImplementedError

    def delete_study(self, study_id: int) -> None:
        raise NotImplementedError

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        raise NotImplementedError

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        raise NotImplementedError

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        raise NotImplementedError

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        raise NotImplementedError


def frozen(
    number: int,
    trial: SamplerTrial,
    state: TrialState,
    *,
    distributions: dict[str, BaseDistribution],
    value: float | None = None,
) -> FrozenTrial:
    """The trial as Optuna's samplers read it."""
    # In a conditional space a trial has a part of the parameters. Copied only then: this runs for each point and ask.
    whole = len(trial.params) == len(distributions)
    own = distributions if whole else {name: distributions[name] for name in trial.params}
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=state,
        value=value,
        datetime_start=None,
        datetime_complete=None,
        params=trial.params,
        distributions=own,
        user_attrs={},
        system_attrs=trial.notes,
        intermediate_values={},
    )
