"""Servers of tests: their ports, and how it is noticed that one is dead."""

import socket

import pytest
from servers import PORTS, Server, free_port, given_away, turn

# Answers until it is asked for anything but its health; then its log says that a worker died, and nothing is answered.
DYING = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Engine(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            print("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down", flush=True)
            time.sleep(600)
        self.send_response(200)
        self.end_headers()

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Engine).serve_forever()
"""


def test_free_port_where_the_system_says_what_it_gives_away_is_none_of_that():
    if not set(PORTS) - set(given_away()):
        pytest.skip("the system gives away all of them")
    assert not {free_port() for _ in range(20)} & set(given_away())


def test_free_port_behind_one_that_is_taken_is_given_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port() + 1))
        ports = [free_port() for _ in range(5)]
    assert len(set(ports)) == len(ports)


def test_turn_with_ports_to_avoid_among_them_has_the_others_first():
    assert sorted(turn(7_777_777, range(12_345, 61_000))[:2_345]) == list(range(10_000, 12_345))


@pytest.mark.parametrize("avoided", [range(0), range(32_768, 61_000), range(1_024, 65_536)])
def test_turn_where_all_or_none_are_to_be_avoided_has_every_port(avoided):
    assert sorted(turn(7_777_777, avoided)) == list(PORTS)


def test_engine_whose_worker_died_is_noticed_while_it_is_asked(tmp_path):
    server = Server(tmp_path, ["-c", DYING], {})
    try:
        with pytest.raises(AssertionError, match=r"died by itself.*exit code: -4"):
            server.call("/weight_info")
    finally:
        server.end()
