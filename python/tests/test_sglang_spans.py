"""Labels of tokens, as the hooks into SGLang's steps put them together: steps that are under way while weights change."""

import types

import pytest
from driftless_rl.sglang import _spans


class Request:
    """A request that wants log-probabilities."""

    def __init__(self):
        self.return_logprob, self.customized_info, self.output_ids = True, None, []

    def labels(self):
        return self.customized_info[_spans.KEY]


def launch(request):
    """A step as the scheduler launches it: its tokens are looked at later."""
    result = types.SimpleNamespace()
    _spans._ran(result, None, None)
    return request, result


def look(step, tokens=1):
    """The scheduler looks at what a step drew."""
    request, result = step
    _spans._processed(None, None, result)
    request.output_ids += [7] * tokens
    _spans._collected(None, None, 0, request, None)


@pytest.fixture(autouse=True)
def weights():
    _spans.begin(types.SimpleNamespace(weight_version="a"))
    yield
    _spans.begin(types.SimpleNamespace())


def test_a_step_under_way_is_of_the_weights_that_it_began_with():
    request = Request()
    look(launch(request))
    under_way = launch(request)
    _spans.change("b")
    # With overlap the next step begins before the one before is looked at.
    behind = launch(request)
    look(under_way)
    look(behind)
    look(launch(request))
    assert request.labels() == ["a", "", "b", ""]


def test_tokens_of_weights_that_are_not_known_have_no_label():
    request = Request()
    look(launch(request))
    _spans.change(None)
    look(launch(request))
    look(launch(request))
    _spans.change("b")
    look(launch(request))
    assert request.labels() == ["a", None, None, "b"]
    # A result of a step that began before the plugin was there.
    other = Request()
    look((other, types.SimpleNamespace()))
    assert other.labels() == [None]


def test_tokens_that_are_taken_back_take_their_labels_along():
    request = Request()
    for _ in range(3):
        look(launch(request))
    _spans.change("b")
    del request.output_ids[1:]
    look(launch(request))
    look(launch(request))
    assert request.labels() == ["a", "b", ""]


def test_nothing_is_told_of_drafts_and_of_replies_without_log_probabilities():
    request = Request()
    request.return_logprob = False
    look(launch(request))
    assert request.customized_info is None
    _spans.begin(types.SimpleNamespace(weight_version="a", speculative_algorithm="EAGLE"))
    _spans.change("b")
    request = Request()
    look(launch(request), tokens=3)
    assert request.labels() == [None] * 3
