"""Ports that servers of tests are started on."""

import pytest
from servers import PORTS, free_port, given_away, turn


def test_free_port_where_the_system_says_what_it_gives_away_is_none_of_that():
    if not set(PORTS) - set(given_away()):
        pytest.skip("the system gives away all of them")
    assert not {free_port() for _ in range(20)} & set(given_away())


def test_turn_with_ports_to_avoid_among_them_has_the_others_first():
    assert sorted(turn(7_777_777, range(12_345, 61_000))[:2_345]) == list(range(10_000, 12_345))


@pytest.mark.parametrize("avoided", [range(0), range(32_768, 61_000), range(1_024, 65_536)])
def test_turn_where_all_or_none_are_to_be_avoided_has_every_port(avoided):
    assert sorted(turn(7_777_777, avoided)) == list(PORTS)
