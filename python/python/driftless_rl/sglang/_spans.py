"""Which weights drew which token, told with each reply that has log-probabilities, from SGLang 0.5.14 on.

SGLang's own spans, where a release has them, begin where the scheduler learned of a change. The step that was under way then
is counted to the new weights, which did not draw it. Here each step carries the label of the weights that it began with.

``meta_info["driftless_labels"]`` has an entry for each token of a reply, or of a piece of a stream: a label where it is
another than that of the token before, an empty text where it is the same, and null where it is not known.
"""

from .._inner import find

KEY = "driftless_labels"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_RUN = ((f"{_SCHEDULER}.run_batch",), ("self", "batch"))
_PROCESS = ((f"{_SCHEDULER}.process_batch_result",), ("self", "batch", "result"))
_COLLECT = ((f"{_PROCESSOR}._maybe_collect_customized_info",), ("self", "i", "req", "logits_output"))


class _Weights:
    """Those of this process."""

    # Whether a step draws a token of each request, so that a token has one label.
    known = False
    # The label of what steps begin with now; None if that is not known.
    label = None
    # That of the step whose tokens are being looked at.
    drew = None


_weights = _Weights()


def register(registry, types) -> None:
    """Hooks into SGLang's steps, if they are known. Replies then say nothing where they are not."""
    if all(find(*function)[0] for function in (_RUN, _PROCESS, _COLLECT)):
        registry.register(_RUN[0][0], _ran, types.AFTER)
        registry.register(_PROCESS[0][0], _processed, types.BEFORE)
        registry.register(_COLLECT[0][0], _collected, types.AFTER)


def begin(arguments) -> None:
    """The weights that an engine with these arguments starts with."""
    # Drafts that are checked later are of several steps.
    _weights.known = not getattr(arguments, "speculative_algorithm", None)
    change(getattr(arguments, "weight_version", None))


def change(label: str | None) -> None:
    """From now on steps begin with these weights; None for weights of which nothing is known."""
    _weights.label = label if _weights.known else None


def _ran(result, scheduler, batch, *args, **kwargs) -> None:
    if result is not None:
        result.driftless_label = _weights.label


def _processed(scheduler, batch, result, *args, **kwargs) -> None:
    _weights.drew = getattr(result, "driftless_label", None)


def _collected(result, processor, i, request, *args, **kwargs) -> None:
    if not getattr(request, "return_logprob", False):
        return
    if request.customized_info is None:
        request.customized_info = {}
    labels, drawn = request.customized_info.setdefault(KEY, []), len(request.output_ids)
    known, last = getattr(request, "_driftless_drawn", (0, None))
    if known != drawn - 1 or len(labels) != known:
        # Tokens were taken back, or came several at a time: what stays of them keeps its labels.
        del labels[max(min(known, drawn - 1), 0) :]
        last = next((label for label in reversed(labels) if label != ""), None)
    while len(labels) < drawn:
        label = _weights.drew
        labels.append("" if labels and label is not None and label == last else label)
        last = label
    request._driftless_drawn = (drawn, last)
