"""Trainers as public repositories have them; none of them knows of memfit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer


class ClassWeighted(Trainer):  # type: ignore[misc]  # transformers' own base
    """Cross entropy with a weight per class, whose mean is over the weights of the labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the weighted mean."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 2.0], dtype=logits.dtype))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class Contrastive(Trainer):  # type: ignore[misc]
    """In-batch negatives between two texts, by the mean of their last hidden states."""

    def _embedded(self, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=-1)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return InfoNCE."""
        one = self._embedded(model, inputs["input_ids"], inputs["attention_mask"])
        other = self._embedded(model, inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1))
        scores = one @ other.T / 0.05
        labels = torch.arange(scores.size(0), device=scores.device)
        loss = F.cross_entropy(scores, labels)
        return (loss, {"scores": scores}) if return_outputs else loss


class RDrop(Trainer):  # type: ignore[misc]
    """Two passes that draw other dropout masks, held together by their divergence."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return cross entropy and divergence."""
        labels = inputs.pop("labels")
        one, other = model(**inputs).logits, model(**inputs).logits
        entropy = 0.5 * (F.cross_entropy(one, labels) + F.cross_entropy(other, labels))
        log_one, log_other = F.log_softmax(one, -1), F.log_softmax(other, -1)
        divergence = F.kl_div(log_one, log_other, reduction="batchmean", log_target=True)
        divergence = divergence + F.kl_div(
            log_other, log_one, reduction="batchmean", log_target=True
        )
        loss = entropy + 4 * divergence / 2
        return (loss, {"logits": one}) if return_outputs else loss


class Distilling(Trainer):  # type: ignore[misc]
    """A student that follows a teacher, and logs both parts of its loss."""

    def __init__(self, *args: Any, teacher: nn.Module, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.alpha = teacher.eval(), alpha

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the mixture."""
        outputs = model(**inputs)
        with torch.no_grad():
            teacher_logits = self.teacher(**inputs).logits
        temperature = 2.0
        divergence = nn.KLDivLoss(reduction="batchmean")(
            F.log_softmax(outputs.logits / temperature, dim=-1),
            F.softmax(teacher_logits / temperature, dim=-1),
        )
        loss = self.alpha * outputs.loss + (1 - self.alpha) * divergence * temperature**2
        if self.model.training and self.state.global_step % 2 == 0:
            self.log({"ce": outputs.loss.item(), "kd": divergence.item()})
        return (loss, outputs) if return_outputs else loss


class TwoTasks(Trainer):  # type: ignore[misc]
    """A mean over samples plus a mean over those tokens that are labelled."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the sum of both means."""
        token_labels = inputs.pop("token_labels")
        labels = inputs.pop("labels")
        hidden = model.bert(**inputs).last_hidden_state
        of_samples = F.cross_entropy(model.classifier(hidden[:, 0]), labels)
        scores = model.classifier(hidden)
        of_tokens = F.cross_entropy(scores.transpose(1, 2), token_labels, ignore_index=-100)
        loss = of_samples + 0.5 * of_tokens
        outputs = {"loss": loss, "logits": scores[:, 0], "losses": (of_samples, of_tokens)}
        return (loss, outputs) if return_outputs else loss


class Adversarial(Trainer):  # type: ignore[misc]
    """FGM: gradients, a step along them in the embeddings, gradients again, and back."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Go backward twice."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        weight = model.bert.embeddings.word_embeddings.weight
        if weight.grad is None:
            return loss
        kept = weight.data.clone()
        norm = weight.grad.norm()
        if norm != 0 and not torch.isnan(norm):
            weight.data.add_(0.5 * weight.grad / norm)
        with self.compute_loss_context_manager():
            adversarial = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(adversarial)
        weight.data = kept
        return loss


class Momentum(Trainer):  # type: ignore[misc]
    """A loss that is scaled by a moving average of the losses before it."""

    average = 0.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the loss over its average."""
        outputs = model(**inputs)
        loss = outputs.loss
        self.average = 0.9 * self.average + 0.1 * loss.detach().item()
        loss = loss / max(self.average, 1e-3)
        return (loss, outputs) if return_outputs else loss


class Focal(Trainer):  # type: ignore[misc]
    """Focal loss over the positives that there are in the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the sum over positives, by their number."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = F.cross_entropy(outputs.logits, labels, reduction="none")
        focal = (1 - torch.exp(-each)) ** 2 * each
        loss = focal.sum() / (labels > 0).sum().clamp(min=1)
        return (loss, outputs) if return_outputs else loss


class WithTexts(Trainer):  # type: ignore[misc]
    """Weights samples by the length of their texts, which the collator hands on as strings."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the weighted mean."""
        texts = inputs.pop("texts")
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = F.cross_entropy(outputs.logits, labels, reduction="none")
        weights = torch.tensor([float(len(t)) for t, _ in zip(texts, labels, strict=False)])
        loss = (each * weights.to(each.dtype)).mean()
        return (loss, outputs) if return_outputs else loss


class OwnScale(Trainer):  # type: ignore[misc]
    """Normalises by the tokens of the window itself, as its authors were told to."""

    loss_is_scaled_for_ga = True

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: Any = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return a sum over the tokens of the window."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class Ranking(Trainer):  # type: ignore[misc]
    """Pairs of neighbours in a batch, of which the first is preferred."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return the logistic loss of the pairs."""
        inputs = {k: v for k, v in inputs.items() if k != "labels"}
        rewards = model(**inputs).logits[:, 0]
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = -F.logsigmoid(chosen - rejected).mean()
        return (loss, {"rewards": rewards}) if return_outputs else loss


class Balanced(Trainer):  # type: ignore[misc]
    """Adds how unlike the mean prediction of a batch is to an even one."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: Any = False, **_: Any) -> Any:
        """Return cross entropy and the entropy of the mean."""
        outputs = model(**inputs)
        mean = outputs.logits.softmax(-1).mean(0)
        loss = outputs.loss + 0.1 * (mean * mean.log()).sum()
        return (loss, outputs) if return_outputs else loss


def focal_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Compute a loss as ``compute_loss_func`` does, by the items of the window."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none", ignore_index=-100)
    focal = (1 - torch.exp(-each)) ** 2 * each
    return focal.sum() / num_items_in_batch
