"""moto's server on 127.0.0.1, one request at a time: one_at_a_time.py PORT.

moto looks whether an object is there and stores it in two steps. With its own server's threads, two requests that
create one object can both succeed, which no object store allows.
"""

import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

application = DomainDispatcherApplication(create_backend_app)
turn = threading.Lock()


def in_turn(environ, start_response):
    with turn:
        return list(application(environ, start_response))


run_simple("127.0.0.1", int(sys.argv[1]), in_turn, threaded=True, request_handler=MotoRequestHandler)
