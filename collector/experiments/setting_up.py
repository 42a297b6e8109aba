"""From the words of `experiment run|sweep` to arms and to who runs them; what makes no sense is refused here, before a call is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine_probe.errors import UsageError

if TYPE_CHECKING:
    from collector.experiments.options import Shared
    from collector.experiments.runner import Runner
    from collector.experiments.scenarios import Scenario
    from diagnosis.experiments.design import Arm


def arms_of(
    scenario: Scenario, words: Sequence[str], settings: Sequence[str], model: str | None, *, is_virtual: bool
) -> list[Arm]:
    """A, B, C, D of the scenario, or the arms that `--arm` names, over what `--set` sets in all.

    Arms of one's own begin from the scenario with its cache on. An endpoint takes none of the scenario's engine settings.
    """
    from collector.experiments.arm_settings import parse_arm, parse_settings
    from diagnosis.experiments.design import Arm, factorial

    common = {} if not is_virtual else dict(scenario.common)
    if is_virtual and model is not None:
        common["model"] = model
    common |= parse_settings(settings, "--set")
    off, on = (scenario.off, scenario.on) if is_virtual else ({"cache": "off"}, {"cache": "on"})
    if not words:
        return factorial({**common, **off}, {**common, **on})
    if len(words) < 2:
        raise UsageError("one --arm has nothing to be compared with; give two or more, the control first")
    base = {**on, **common} if is_virtual else common
    told = [parse_arm(word) for word in words]
    return [Arm(arm.name, {**base, **_aliased(arm.settings, base)}, is_warm=arm.is_warm) for arm in told]


def _aliased(settings: Any, base: Any) -> dict[str, str]:
    """The arm's settings under the names that the base uses, so that `prefix_caching=off` overrides `cache=on`."""
    from collector.experiments.arm_settings import OTHER_NAMES

    known = {OTHER_NAMES.get(key, key): key for key in base}
    return {known.get(OTHER_NAMES.get(key, key), key): value for key, value in settings.items()}


def runner_of(shared: Shared, *, endpoint_off: str | None = None, blocks: bool = True) -> Runner:
    """Virtual time, or the endpoint. Raises UsageError for options of the one that were given with the other."""
    if shared.jobs is not None and shared.jobs < 1:
        raise UsageError(f"--jobs is {shared.jobs}; expected 1 or more")
    if shared.endpoint is None:
        for option, value in (
            ("--endpoint-off", endpoint_off),
            ("--ca", shared.ca),
            ("--insecure", shared.insecure or None),
            ("--prompt", shared.prompt if shared.prompt != "words" else None),
        ):
            if value is not None:
                raise UsageError(
                    f"{option} belongs to an --endpoint URL; without one the embedded engine runs in virtual time"
                )
        from collector.experiments.virtual import VirtualRunner

        return VirtualRunner(shared.jobs, blocks)
    if not 0 < shared.timeout < float("inf"):
        raise UsageError(f"--timeout is {shared.timeout}; expected seconds above 0")
    from collector.experiments.endpoint import EndpointRunner, Target
    from collector.terminal.output import say
    from engine_probe.attach.fetch import normalise_url, trust
    from engine_probe.load.prompts import PromptWriter

    target = Target(
        normalise_url(shared.endpoint),
        None if endpoint_off is None else normalise_url(endpoint_off),
        shared.model,
        shared.key,
        trust(shared.ca, insecure=shared.insecure),
        shared.timeout,
        PromptWriter(shared.prompt, shared.vocab),
    )
    return EndpointRunner(target, shared.seed, say)
