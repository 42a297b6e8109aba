"""The life of an alert: fires on a second window alone, resolves after its cool-down, and never uses data twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from alerts.condition import Condition, Look
from alerts.lifecycle import MOST_LOOKS, Pace, carried_on, claim, confirmed, confirming_window, rebased
from store.alert_rows import Alert
from store.interface import Window

PACE = Pace(hold=300, cool_down=200, lost=3600)
SLOW = Condition({"alertname": "Slow", "severity": "warning"}, {"summary": "slow"}, starts_ns=120)
QUIET = Look()
BLIND = Look(can_tell=False, because="too few requests")
SHOWN = Look((SLOW,), baseline="0/50")


def _claimed() -> Alert:
    made = claim(SLOW, Window(100, 400), "0/50", None, now_ns=430)
    assert made is not None
    return made


def _fired() -> Alert:
    return confirmed(_claimed(), SHOWN, Window(400, 700), now_ns=730)


def test_a_first_sight_is_pending_and_keeps_its_baseline() -> None:
    """Nobody is told yet; the window it was seen in ends at 400, and the data up to there are spent."""
    alert = _claimed()
    assert (alert.state, alert.claimed_until_ns, alert.baseline, alert.starts_ns) == ("pending", 400, "0/50", 120)


def test_the_confirming_window_begins_where_the_first_ended() -> None:
    """Not before 300 ns of new data are there, and none of the old are in it."""
    assert confirming_window(_claimed(), PACE, end_ns=699) is None
    assert confirming_window(_claimed(), PACE, end_ns=700) == Window(400, 700)


def test_it_fires_when_the_second_window_shows_it_and_is_dismissed_when_not() -> None:
    """One finding by chance is told to nobody."""
    fired = _fired()
    assert (fired.state, fired.fired_ns, fired.last_seen_ns, fired.ends_ns) == ("firing", 730, 700, None)
    dismissed = confirmed(_claimed(), QUIET, Window(400, 700), now_ns=730)
    assert (dismissed.state, dismissed.ends_ns, dismissed.fired_ns) == ("dismissed", 730, None)
    assert dismissed.annotations["dismissed"] == "a second window did not show it"


def test_a_dismissed_claim_is_not_made_again_of_the_same_data() -> None:
    """The dismissal used data until 700: a window that begins before says nothing new, one from there on may claim."""
    dismissed = confirmed(_claimed(), QUIET, Window(400, 700), now_ns=730)
    assert claim(SLOW, Window(699, 999), "0/50", dismissed, now_ns=1029) is None
    again = claim(SLOW, Window(700, 1000), "0/50", dismissed, now_ns=1030)
    assert again is not None
    assert again.alert_id != dismissed.alert_id


def test_a_window_that_cannot_tell_grows_and_gives_up_at_the_third() -> None:
    """Confirming windows of 300, 600 and 1200 ns; then it is dismissed with the reason why nothing could be told."""
    alert = _claimed()
    lengths = []
    for _ in range(MOST_LOOKS):
        end = next(end for end in range(400, 5000) if confirming_window(alert, PACE, end) is not None)
        lengths.append(end - 400)
        alert = confirmed(alert, BLIND, Window(400, end), now_ns=end + 30)
    assert lengths == [300, 600, 1200]
    assert (alert.state, alert.annotations["dismissed"]) == ("dismissed", "too few requests")


def test_it_resolves_after_the_cool_down_and_not_for_one_quiet_look() -> None:
    """Last seen in the window that ended at 700; quiet at 800 it goes on, at 900 it is over."""
    at_800 = carried_on(_fired(), [QUIET], Window(500, 800), PACE, now_ns=830)
    assert at_800.state == "firing"
    resolved = carried_on(at_800, [QUIET], Window(600, 900), PACE, now_ns=930)
    assert (resolved.state, resolved.ends_ns) == ("resolved", 930)


def test_a_clock_that_is_set_back_holds_up_no_alert() -> None:
    """Seen last by a clock that was ahead: what is quiet from now on for the cool-down is resolved, and claims can be made again."""
    ahead = replace(_fired(), last_seen_ns=9_000, claimed_until_ns=9_000)
    now = rebased(ahead, 700)
    assert (now.last_seen_ns, now.claimed_until_ns) == (700, 700)
    assert rebased(now, 700) is now
    assert carried_on(now, [QUIET], Window(600, 900), PACE, now_ns=930).state == "resolved"
    dismissed = replace(ahead, state="dismissed")
    assert claim(SLOW, Window(400, 700), "0/50", dismissed, now_ns=730) is not None


def test_an_alert_that_flaps_fires_once() -> None:
    """Seen, quiet, seen again within the cool-down: one episode."""
    alert = _fired()
    for end in range(800, 4000, 100):
        alert = carried_on(alert, [SHOWN if end % 200 == 0 else QUIET], Window(end - 300, end), PACE, end + 30)
    assert alert.state == "firing"
    assert alert.alert_id == _claimed().alert_id


def test_blindness_is_not_health() -> None:
    """While nothing can be told it fires on; after `lost` it ends, since nobody can say that it goes on either."""
    blind = carried_on(_fired(), [BLIND], Window(3900, 4200), PACE, now_ns=4230)
    assert blind.state == "firing"
    assert carried_on(blind, [BLIND], Window(4000, 4300), PACE, now_ns=4330).state == "resolved"


def test_its_own_baseline_keeps_it_alive() -> None:
    """The baseline chosen by rule has come to hold the incident and shows nothing; the one it was claimed against still does."""
    alive = carried_on(_fired(), [QUIET, SHOWN], Window(900, 1200), PACE, now_ns=1230)
    assert (alive.state, alive.last_seen_ns) == ("firing", 1200)


def test_a_severity_that_rises_is_the_same_alert() -> None:
    """Labels that move are no part of the fingerprint; the alert shows the newest."""
    worse = Condition({**SLOW.labels, "severity": "critical"}, {"summary": "very slow"}, 120)
    assert worse.fingerprint == SLOW.fingerprint
    after = carried_on(_fired(), [Look((worse,))], Window(500, 800), PACE, now_ns=830)
    assert after.labels["severity"] == "critical"
    assert after.annotations["summary"] == "very slow"


@given(st.lists(st.sampled_from(["shown", "quiet", "blind"]), max_size=60))
def test_windows_of_one_claim_never_share_time(story: list[str]) -> None:
    """Whatever is seen: it fires only after two windows without common time, and never twice from one claim."""
    looks = {"shown": SHOWN, "quiet": QUIET, "blind": BLIND}
    alert: Alert | None = None
    ended: Alert | None = None
    used: list[tuple[int, int]] = []
    for number, word in enumerate(story):
        end = 300 + 100 * number
        window, now = Window(end - 300, end), end + 30
        look = looks[word]
        if alert is None and look.conditions:
            alert = claim(SLOW, window, "0/50", ended, now)
            if alert is not None:
                assert all(last <= end - 300 for _, last in used)
                used = [(end - 300, end)]
        elif alert is not None and alert.state == "pending":
            second = confirming_window(alert, PACE, end)
            if second is not None:
                assert second.start_ns is not None
                assert second.start_ns >= used[0][1]
                alert = confirmed(alert, look, second, now)
                used.append((second.start_ns, end))
        elif alert is not None:
            alert = carried_on(alert, [look], window, PACE, now)
        if alert is not None and alert.state in ("dismissed", "resolved"):
            assert (alert.state == "resolved") == (alert.fired_ns is not None)
            ended, alert = alert, None
            used = used if ended.state == "dismissed" else []
