"""A change of the api-version: it voids confirmations, is no gap, and ends no event within five minutes."""

import msgspec
import pytest
from document_kit import NOW, SOON, Agent, at, document, event

PREVIEW, STABLE = "2024-07-09", "2020-07-01"
RISK = event(event_id="R", event_type="SpotRebalanceRecommendation")
STARTED = event("Started", not_before=None)


def shown(version, *events, incarnation=1):
    return msgspec.structs.replace(document(*events, incarnation=incarnation), api_version=version)


def watching(*events):
    agent = Agent(document())
    agent.observe(shown(PREVIEW, *events), 0)
    agent.seen.clear()
    return agent


def test_an_absence_under_the_older_version_counts_after_five_minutes():
    agent = watching(STARTED)
    assert agent.feed(*[shown(STABLE)] * 300) == []
    assert agent.feed(shown(STABLE), start=301) == [(301, "completed", "inferred")]


def test_recommendation_only_in_the_newer_version_ends_after_five_minutes():
    agent = watching(RISK)
    assert agent.feed(*[shown(STABLE)] * 301) == [(301, "canceled", "inferred")]


def test_a_good_response_under_the_newer_version_restarts_the_five_minutes():
    agent = watching(STARTED)
    agent.feed(*[shown(STABLE)] * 200, shown(PREVIEW, STARTED))
    assert agent.feed(*[shown(STABLE)] * 300, start=202) == []


def test_an_event_that_the_older_version_shows_ends_under_it_as_usual():
    agent = watching(STARTED)
    agent.feed(shown(STABLE, STARTED))
    assert agent.feed(*[shown(STABLE)] * 5, start=2) == [(6, "completed", "observed")]


def test_a_change_of_the_version_voids_a_pending_confirmation():
    agent = watching(STARTED)
    agent.feed(shown(STABLE, STARTED), *[shown(STABLE)] * 4)
    assert agent.feed(*[shown(PREVIEW)] * 4, start=6) == []
    assert agent.feed(shown(PREVIEW), start=10) == [(10, "completed", "observed")]


@pytest.mark.parametrize("versions", [(PREVIEW, STABLE), (STABLE, PREVIEW)])
def test_other_extra_fields_of_the_other_version_are_kept_without_a_record(versions):
    before, after = versions
    agent = Agent(document())
    agent.observe(shown(before, event(extra={"Old": 1})), 0)
    assert agent.feed(shown(after, event(extra={"New": 2}))) == []
    assert agent.tracker.document.events[0].extra == {"New": 2}
    assert agent.feed(shown(after, event(extra={"New": 3})), start=2) == [(2, "updated", "observed")]


def test_an_event_that_reappears_under_another_version_has_no_updated_record():
    agent = watching(event(extra={"Old": 1}))
    assert agent.feed(shown(STABLE), shown(STABLE, event(extra={"New": 2}))) == []


def test_after_a_change_the_incarnations_are_not_compared_and_there_is_no_gap():
    agent = Agent(document())
    agent.observe(shown(STABLE, event(), incarnation=9), 0)
    assert agent.feed(*[shown(PREVIEW, incarnation=2)] * 5) == [(5, "canceled", "inferred")]
    assert SOON > NOW


def test_the_version_of_the_stored_document_counts_after_a_restart():
    agent = watching(STARTED)
    agent.feed(shown(STABLE))
    agent.restart()
    assert agent.feed(*[shown(STABLE)] * 200, start=2) == []
    assert agent.stored.api_version == PREVIEW
    update = agent.observe(shown(STABLE, STARTED), 203)
    assert update.document.api_version == STABLE
    assert agent.tracker.active_event_ids(at(203)) == ("A-1",)
