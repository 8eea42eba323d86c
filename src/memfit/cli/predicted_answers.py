"""Answers of ``memfit predict`` about a job or a step, for one device or several."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .device_by_device import FoundAnswers, for_each_device
from .job_arguments import status
from .prediction_files import own_device
from .question import Question

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.devices.spec import Device
    from memfit.figures import Advice, Prediction
    from memfit.job import Job, StepBuilder
    from memfit.peak_changes.moments import StepMoments
    from memfit.prediction.card_replays import CardReplays
    from memfit.prediction.compared_cards import ComparedCard
    from memfit.prediction.largest_batch import PredictedJob
    from memfit.prediction.lives import Life
    from memfit.prediction.shared_recordings import LoadedTarget, SharedRecordings

Progress = Callable[[str], object]
_FEW_DEVICES = 8
"""For so many the largest batch is looked for, which takes several recordings on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found for one device."""

    prediction: Prediction
    moments: StepMoments
    advice: Sequence[Advice] = ()
    card: ComparedCard | None = None
    """What is shown of it beside other devices."""
    lives: Callable[[], Sequence[Life]] = tuple
    """Gives the lives of its blocks, which only a page shows."""

    def to_json(self, source: str) -> dict[str, Any]:
        """Return everything as plain values."""
        from dataclasses import asdict

        from memfit.peak_changes.saved import prediction_document
        from memfit.reports.wording import advice_sentence, verdict

        beside = {"largest_micro_batch_size": None, "largest_micro_batch_reason": ""}
        fields = {
            **self.prediction.to_json(),
            **own_device(self.prediction),
            "verdict": verdict(self.prediction),
            "advice": [{**asdict(entry), "text": advice_sentence(entry)} for entry in self.advice],
            **(beside if self.card is None else self.card.to_json()),
        }
        return prediction_document(source, fields, self.moments)


def answer_job(
    args: argparse.Namespace, question: Question, console: Console
) -> FoundAnswers[Answer]:
    """Find the answers about a job or a step."""
    from memfit.errors import UsageError
    from memfit.job import BuildsTrainerError
    from memfit.prediction.shared_recordings import SharedTargets
    from memfit.virtual.process_group import one_rank_of
    from memfit.virtual.tensors import ValuesNeededError

    of_the_step = (BuildsTrainerError, ValuesNeededError, UsageError)
    targets = SharedTargets(args.job, question.settings)

    def answer(device: Device, show: Progress) -> Answer:
        with one_rank_of(question.placement_on(device)):
            return _Asked(targets.on(device), device, question, show).answer()

    with status(console, "recording the step", quiet=args.json) as show:
        return for_each_device(question.devices, answer, show, passes_on=of_the_step)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one device is asked about."""

    loaded: LoadedTarget
    device: Device
    question: Question
    show: Progress

    def answer(self) -> Answer:
        """Find the answer."""
        from memfit.job import BuildsJobError, Job

        target = self.loaded.target
        if isinstance(target, Job):
            return self._of_job(target)
        try:
            return self._of_step(target)
        except BuildsJobError:
            return self._of_job(self.loaded.as_job())

    @property
    def _recordings(self) -> SharedRecordings:
        return self.loaded.recordings

    @property
    def _is_alone(self) -> bool:
        return len(self.question.devices) == 1

    def _of_step(self, builder: StepBuilder) -> Answer:
        """Record any code."""
        from memfit.errors import UsageError
        from memfit.prediction.predict import evaluate_steps

        replays = self._recordings.of_steps(builder, self.device)
        if self.question.plan is not None:
            raise UsageError(
                f"--plan changes how memfit runs a memfit.Job, and {builder.name} builds a "
                "step of its own. Leave --plan out, or describe the step as a memfit.Job."
            )
        prediction = evaluate_steps(
            replays.recording, self.device, **self.question.judged_by, replays=replays
        )
        return self._with_the_rest(replays, prediction)

    def _of_job(self, job: Job) -> Answer:
        """Record a job."""
        from memfit.prediction.largest_batch import PredictedJob
        from memfit.prediction.predict import evaluate, part_under, with_other_spread
        from memfit.prediction.recording import Recording, record
        from memfit.prediction.shared_recordings import job_recording
        from memfit.session.batches import find_layout
        from memfit.strategies.plan import Plan

        plan, device = self.question.plan or Plan(), self.device
        job = part_under(plan, job)
        layout = find_layout(job)
        replays = self._recordings.of_job(job, plan, layout, device=device)
        recording = job_recording(replays)
        again = partial(record, job, plan, layout, device=device, facts=recording.facts)

        def judge(recorded: Recording) -> Prediction:
            known = replays if recorded is recording else None
            return evaluate(job, recorded, device, plan, **self.question.judged_by, replays=known)

        prediction = with_other_spread(judge(recording), recording, again, judge)
        predicted = PredictedJob(
            job=job,
            plan=plan,
            layout=layout,
            device=device,
            settings=self.question.settings,
            recording=recording,
            prediction=prediction,
            recordings=None if self._is_alone else self._recordings,
        )
        return self._with_the_rest(replays, prediction, predicted)

    def _with_the_rest(
        self, replays: CardReplays, prediction: Prediction, job: PredictedJob | None = None
    ) -> Answer:
        """Add what is asked besides: advice about one device, the largest batch on several."""
        from memfit.prediction.advice import advise, largest_holders
        from memfit.prediction.compared_cards import compared_card
        from memfit.prediction.largest_batch import largest_batch
        from memfit.prediction.lives import lives_of
        from memfit.prediction.step_moments import step_moments

        recording, device, question = replays.recording, self.device, self.question
        holders = largest_holders(recording, device, question.num_holders)
        prediction = replace(prediction, largest=holders)
        moments = step_moments(recording, device)
        if not self._is_alone:
            found = None
            if job is not None and len(question.devices) <= _FEW_DEVICES:
                self.show(f"looking for the largest batch on {device.name}")
                found = largest_batch(job)
            card = compared_card(
                prediction,
                recording,
                device,
                recorded_for=replays.recorded_for,
                largest_batch=found,
            )
            return Answer(prediction=prediction, moments=moments, card=card)
        self.show(f"looking for what would change the answer on {device.name}")
        advice = advise(recording, prediction, device, question.settings, job)
        lives = partial(lives_of, recording, device)
        return Answer(prediction=prediction, moments=moments, advice=advice, lives=lives)
