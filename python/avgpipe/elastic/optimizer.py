"""An optimizer whose steps take part in elastic averaging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from avgpipe.elastic.matching import holds, optimized, replica_tensors
from avgpipe.elastic.reference import Reference
from avgpipe.elastic.trial import TrialSteps, WaitingGradient

if TYPE_CHECKING:
    from avgpipe.elastic.fused import FusedStep, FusedUpdate

EXTRA_KEY = "elastic"


class ElasticAveraging(torch.optim.Optimizer):
    """``inner_optimizer``, with replica ``replica`` tied to ``reference`` after every ``period`` steps.

    A ``torch.optim.Optimizer``: groups, state, defaults and ``zero_grad`` are the inner's own; hooks and learning-rate
    schedulers may be put on either; closures and ``torch.amp.GradScaler`` work. A step that the scaler skips still
    takes part in its round, with an update of zero.

    With replicas in one process and staleness 0 or 1, step them in turn, in any order: a step that needs a
    missing update raises RuntimeError (``ready`` predicts it). With a group, a step waits for the others.

    The replica's tensors move into flat buffers, one per dtype and device, as their views, so that every pass is one
    over flat memory, and a step can be fused. They remain the same objects, with the same values; other references
    to their old memory, such as a captured graph, no longer follow them. For tensors that cannot be moved (complex
    tensors, other dtypes, devices or strides than the reference's, shared memory), averaging works on a copy of
    the weights, filled before and written back after.

    Args:
        inner_optimizer: The optimizer of the replica's parameters.
        reference: The reference that the replicas are averaged with.
        replica: Which of the reference's replicas this is; by default 0, or the rank in the reference's group.
        parameters: The replica's tensors in the order in which the reference was built; by default those that the inner
            optimizer holds, which must then be in that order. Needed when groups change it, when the optimizer holds
            only some of the trainable parameters, and when the reference is over flat buffers of which the optimizer's
            parameters are views.
        fused: Whether the step of torch.optim.SGD, Adam or AdamW and the averaging are one pass over memory, which
            rounds differently from two passes but changes nothing else; state_dict is the same. True: if
            possible, decided at every step (not with period > 1, amsgrad, differentiable, settings on an
            accelerator, weights that are not in flat buffers, post-step hooks of the inner optimizer, or N =
            1 without elasticity). A fused pass reads gradients as GradScaler has scaled them, and leaves them
            so. Pre-step hooks may change gradients, and their changes of weights count as done before the
            round. It ignores the inner optimizer's ``foreach``.
    """

    def __init__(
        self,
        inner_optimizer: torch.optim.Optimizer,
        reference: Reference,
        replica: int | None = None,
        *,
        parameters: Iterable[torch.Tensor] | None = None,
        fused: bool = True,
    ) -> None:
        if not isinstance(inner_optimizer, torch.optim.Optimizer) or isinstance(
            inner_optimizer, ElasticAveraging
        ):
            raise TypeError(
                f"inner_optimizer must be a plain torch.optim.Optimizer, not {type(inner_optimizer).__name__}"
            )
        if not isinstance(reference, Reference):
            raise TypeError(f"reference must be an avgpipe.Reference, not {type(reference).__name__}")
        if replica is None:
            replica = reference._rank
        self.inner, self.reference, self.replica = inner_optimizer, reference, replica
        tensors = replica_tensors(inner_optimizer, reference.parameters, reference.averaged, parameters)
        self._replica = reference._replica_of(replica, tensors, inner_optimizer)
        self._trial: TrialSteps | None = None
        self._fused: FusedStep | None = None
        if reference.elasticity.coefficients.tries:
            self._trial = TrialSteps(inner_optimizer, self._replica, reference, replica)
        elif fused:
            from avgpipe.elastic.fused import FusedStep

            self._fused = FusedStep(inner_optimizer, self._replica, reference.z)
        reference._replicas[replica] = self._replica
        self._local_steps = 0
        self._position = 0  # local steps done in the current period
        self._idle_steps = 0  # of these
        self._has_published = False  # an update with the last step
        self._done: Callable[[], None] | None = None  # of a step_in_round
        # The base class's __init__ would build its own groups and state; this sets up only its hooks.
        known = set(inner_optimizer.defaults)
        super().__setstate__({})
        for key in set(inner_optimizer.defaults) - known:  # of the base class, not for inner's new groups
            del inner_optimizer.defaults[key]
        self._warned_capturable_if_run_uncaptured = True

    # With this, GradScaler always calls step(), which unscales and skips itself.
    _step_supports_amp_scaling = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        self.complete()
        return self.inner.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.complete()
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # read-only: the inner optimizer's
        return self.inner.defaults

    @property
    def update(self) -> list[torch.Tensor] | None:
        """The update of this replica's last step, one flat tensor per buffer of the reference's.

        None if that step was not the last of a period. Valid until the next step that is.
        """
        return self.reference._updates[self.replica].flats if self._has_published else None

    @property
    def ready(self) -> bool:
        """Whether step() may run now. With a group always: the step waits instead."""
        return self.reference._may_step(self.replica, self._finishes)

    @property
    def settled(self) -> bool:
        """Whether the weights contain the pull of every round until the replica's last step.

        False only with rule avgpipe and staleness 0, from this replica's contribution to that of all others.
        """
        reference = self.reference
        pulls = reference.elasticity.pulls_at_the_end(reference.round)
        return not (pulls and (self.replica in reference._contributed or self.replica in reference._idle))

    @property
    def skips_on_device(self) -> bool:
        """Whether the next :meth:`step_in_round`, if ``found_inf`` is on the device, leaves the decision there."""
        if self._trial is not None:
            from avgpipe.elastic.fused import takes_found_inf

            outer = self.reference.outer
            return self._joins_gradients and outer is not None and takes_found_inf(outer)
        fused = self._fused
        return fused is not None and fused.is_possible and fused.may_skip_on_device

    @property
    def _finishes(self) -> bool:
        return self._position + 1 == self.reference.elasticity.period

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the inner optimizer's step; the last one of a period then exchanges with the reference.

        RuntimeError, with nothing changed, if updates of others that it needs are missing (see ``ready``).
        """
        reference = self.reference
        if reference._replicas.get(self.replica) is not self._replica:
            raise RuntimeError(
                f"replica {self.replica} was released from its reference; use its new optimizer"
            )
        if reference.is_applied_to(p for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "the model holds the reference's weights: leave reference.applied_to before stepping"
            )
        reference._check_step(self.replica, self._finishes)
        if self._trial is not None:
            return self._trial_step(self._trial, closure)
        args = () if closure is None else (closure,)
        if self._fused is not None and self._fused.is_possible:
            return self._fused_step(self._fused, *args)
        result = self._plain_step(lambda: self.inner.step(*args))
        self._end_step()
        return result

    def step_in_round(self, done: Callable[[], None]) -> None:
        """Run :meth:`step`, possibly later, with the one that completes the round: one pass for all replicas.

        Gradients must not change until ``done`` is called, at the latest by the step that completes the
        round; learning rates and groups may change at once. Weights and state are those before the step until
        then, unless :meth:`complete`, or another method here or in the reference that reads or replaces them,
        does the replica's own part earlier. If all values are finite, the result is the same in every bit.
        """
        self._done = done
        try:
            self.step()
            if self._done is not None:
                done()
        finally:
            self._done = None

    def publish(self, skips: bool) -> None:
        """Publish the gradient of the next step of rule mean-gradient, which may have to wait for the round before.

        ``skips``: no gradient.
        """
        trial, reference = self._trial, self.reference
        assert trial is not None, "only a gradient is known before its step"
        with reference._lock:
            reference._run(self.replica, lambda z: trial.publish(skips))
        trial.is_published = self._has_published = True

    def idle(self) -> None:
        """Count a step that other replicas make, and for which this one has no gradients.

        It counts in the period. A replica without a step in a whole period has no part in its round.
        """
        self._opt_called = True  # for torch's warning of schedules that step first
        if self._trial is not None:
            self._trial.share_settings()
        elif self._position == 0 and self._replica.remembers:
            self._replica.begin()
        self._idle_steps += 1
        self._end_step()

    def complete(self) -> None:
        """Do now what a :meth:`step_in_round` has postponed, if anything."""
        self.reference._complete(self.replica)
        if self._trial is not None:
            self._trial.share()

    @property
    def shares_state(self) -> bool:
        """Whether the inner optimizer's state is the reference's, and the same for all replicas."""
        return self._trial is not None

    def restored(self) -> None:
        """Make the inner optimizer's new state that of all, if replicas share theirs."""
        if self._trial is not None:
            self._trial.restore()

    def replaced(self) -> None:
        """React to replaced weights: a period that has begun starts from these."""
        if self._position and self._replica.remembers:
            self._replica.begin()

    def _end_step(self, update: FusedUpdate | None = None) -> None:
        period = self.reference.elasticity.period
        self._local_steps += 1
        self._position += 1
        self._has_published = self._position == period and self._idle_steps < period
        if self._position < period:
            return
        self._position = self._idle_steps = 0
        reference, done = self.reference, self._done
        if not self._has_published:
            reference._sit_out(self.replica)
            return
        is_joint = reference._joins and update is not None and update.may_wait and not self._is_watched
        if update is None or done is None or not is_joint:
            reference._contribute(self.replica, update)
        else:
            self._done = None
            reference._contribute_later(self.replica, update, done)

    @property
    def _is_watched(self) -> bool:
        """Whether hooks see the weights after every step."""
        return bool(self._optimizer_step_post_hooks or _global_optimizer_post_hooks)

    @property
    def _joins_gradients(self) -> bool:
        """Whether the next :meth:`step_in_round` leaves its gradient to one step by those of all replicas."""
        return self._trial is not None and self.reference._joins_gradients and not self._is_watched

    @property
    def _scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """GradScaler's settings during its step: the scale (None: unscaled already), and whether to skip."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

    def _trial_step(self, trial: TrialSteps, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reference, done = self.reference, self._done
        scale, found_inf = self._scaling
        later = done is not None and self._joins_gradients
        flag = found_inf if found_inf is not None and later and self.skips_on_device else None
        if found_inf is not None and flag is None and bool(found_inf):
            self.inner.zero_grad()
        elif scale is not None:
            _unscale(self.inner, scale)
        self._local_steps += 1
        self._has_published = True
        if later and done is not None:
            self._done = None
            trial.share_settings()  # those of this step: a schedule changes them next
            reference._contribute_later(self.replica, WaitingGradient(trial, flag), done)
        else:
            reference._contribute(self.replica, trial)
        return loss

    def _plain_step(self, step: Callable[[], Any]) -> Any:
        """Call ``step``, the inner optimizer's, as GradScaler's settings require."""
        if self._position == 0 and self._replica.remembers:
            self._replica.begin()
        scale, found_inf = self._scaling
        if found_inf is None:
            return step()
        inner: Any = self.inner
        # with this flag it unscales and skips without waiting for a device
        if getattr(inner, "_step_supports_amp_scaling", False):
            inner.grad_scale, inner.found_inf = scale, found_inf
            try:
                return step()
            finally:
                del inner.grad_scale, inner.found_inf
        if bool(found_inf):
            return None
        if scale is not None:
            _unscale(inner, scale)
        return step()

    def _fused_step(self, fused: FusedStep, *args: Any) -> Any:
        """Run the inner optimizer's step, with its hooks, and the averaging together."""
        from avgpipe.elastic.fused import Unfusable

        scale, found_inf = self._scaling
        skips = fused.skips(found_inf)

        def step(inner: Any, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            try:
                update = fused.prepare(scale, found_inf, skips)
            except Unfusable:
                # because of gradients, after hooks have run: call the class's step without them
                self._plain_step(lambda: type(inner).step.__wrapped__(inner))
                update = None
            self._end_step(update)
            return loss

        inner: Any = self.inner
        if skips and not getattr(inner, "_step_supports_amp_scaling", False):
            return step(inner)  # as if the inner optimizer's step was not called
        if "step" in vars(inner):
            inner._opt_called = True  # for the learning-rate scheduler that has wrapped it
        return torch.optim.Optimizer.profile_hook_step(step)(inner, *args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.complete()
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize more of the replica's tensors; ValueError for those that are not averaged."""
        averaged = self._replica.tensors
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for p in params:
            p = p[1] if isinstance(p, tuple) else p
            if isinstance(p, torch.Tensor) and not holds(averaged, p):
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} is not among the {len(averaged)} tensors "
                    f"that are averaged for replica {self.replica}; build Reference and ElasticAveraging "
                    f"with parameters=replica.parameters(), trainable from the beginning"
                )
        self.complete()
        self.inner.add_param_group({**param_group, "params": params})

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's, and "elastic": local steps, place in the period, its first weights.

        Updates that wait for other replicas are in ``reference.state_dict()``.
        """
        for before_hook in self._optimizer_state_dict_pre_hooks.values():
            before_hook(self)
        self.complete()
        start = self._replica.before if self._position else None
        state = dict(self.inner.state_dict())
        state[EXTRA_KEY] = {
            "local_steps": self._local_steps,
            "position": self._position,
            "start": None if start is None else start.tensors(),
        }
        for after_hook in self._optimizer_state_dict_post_hooks.values():
            state = after_hook(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; it may also be the inner optimizer's own, and then a new period begins."""
        state = dict(state_dict)
        for before_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state = before_hook(self, state) or state
        extra = state.pop(EXTRA_KEY, {"local_steps": 0, "position": 0, "start": None})
        lacking = [key for key in ("state", "param_groups") if key not in state]
        lacking += [
            f"{EXTRA_KEY}[{key!r}]" for key in ("local_steps", "position", "start") if key not in extra
        ]
        if lacking:
            raise ValueError(
                f"the state lacks {', '.join(lacking)}: pass what state_dict() of an ElasticAveraging, or of its inner "
                "optimizer, returned"
            )
        period = self.reference.elasticity.period
        if not 0 <= extra["position"] < period:
            raise ValueError(
                f"the state was saved after step {extra['position']} of a period, but the period is "
                f"{period}; load it with the period of the run that saved it"
            )
        if (extra["start"] is not None) != (self._replica.remembers and extra["position"] > 0):
            raise ValueError(
                "the state was saved under another rule; load it with the rule of the run that saved it"
            )
        self.complete()
        self.inner.load_state_dict(state)
        self.restored()
        self._local_steps, self._position = extra["local_steps"], extra["position"]
        self._idle_steps, self._has_published = 0, False
        if extra["start"] is not None:
            for mine, value in zip(self._replica.begin().tensors(), extra["start"]):
                mine.copy_(value)
        for after_hook in self._optimizer_load_state_dict_post_hooks.values():
            after_hook(self)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an ElasticAveraging is tied to its Reference and cannot be copied; save its state_dict()"
        )

    def __repr__(self) -> str:
        return f"ElasticAveraging(replica {self.replica} of {self.reference!r},\n{self.inner!r})"


@torch.no_grad()
def _unscale(inner: torch.optim.Optimizer, scale: torch.Tensor) -> None:
    factor = scale.double().reciprocal().float()
    for p in optimized(inner):
        if p.grad is None:
            continue
        if p.grad.dtype == torch.float16:
            raise ValueError(
                "float16 gradients cannot be unscaled; keep parameters in float32, under autocast"
            )
        p.grad.mul_(factor.to(p.grad.device))
