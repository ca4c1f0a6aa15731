"""The tied head with softmax cross-entropy on the device: classifier.cu between two matrix products.

Forward stores dlogits in `exponentials`, and does not use `row_scale`. Between backward and the next forward, dlogits
is not needed. So its gigabytes are the device's `spare` memory, which cuDNN uses as its workspace.
"""

import math

import numpy as np

from gpt2.kernels.cupy.launch import THREADS, int32, storage
from gpt2.model_shards import ONE_SHARD

ROW_THREADS = 1024
LOGITS_BYTES = 1 << 30  # at most this many bytes of logits at once if no gradient is wanted


def classifier_forward(
    device, losses, exponentials, row_scale, inputs, wte, targets, vocab_size, scale, first_token=0, tp_group=ONE_SHARD
):
    """Compute losses (N,) float32 of inputs (N, C) against host targets (N,), with wte (Vp, C).

    exponentials (N, Vp) gets dlogits * scale; None if only the losses are wanted. Shards of the vocabulary exchange a
    maximum of N numbers and a sum of 2 N.
    """
    if exponentials is not None:
        device.spare = None
    known = min(max(0, vocab_size - first_token), len(wte))  # pad rows do not count; the last shard may have only those
    targets = device.upload("targets", targets - first_token)
    if tp_group is not ONE_SHARD:
        return _forward_of_shard(device, losses, exponentials, inputs, wte, targets, known, scale, tp_group)
    for rows, logits in _logits(device, exponentials, inputs, wte):
        cross_entropy(device, losses[rows], logits, targets[rows], known, scale, exponentials is not None)


def classifier_backward(device, dinputs, dwte, exponentials, row_scale, inputs, wte, accumulate):
    """Compute dinputs (N, C) = dlogits @ wte; dwte (Vp, C) = or += dlogits.T @ inputs. Forward stored dlogits."""
    device.matmul(dinputs, exponentials, wte)
    device.matmul(dwte, exponentials.T, inputs, accumulate=accumulate)
    device.spare = exponentials


def _forward_of_shard(device, losses, exponentials, inputs, wte, targets, known, scale, tp_group):
    """Run forward of a vocabulary shard. Shards may cut rows differently, so they exchange all rows at once."""
    N = len(inputs)
    own_maxima = device.scratch("own_maxima", (N,), np.float32)
    maxima = device.scratch("maxima", (N,), np.float32)
    both = device.scratch("sums_and_target_logits", (2, N), np.float32)
    sums, target_logits = both
    for rows, logits in _logits(device, exponentials, inputs, wte):
        row_statistics(device, own_maxima[rows], sums[rows], target_logits[rows], logits, targets[rows], known)
    maxima[:] = own_maxima
    maxima = tp_group.maximum(maxima)
    launch_numbers(device, "rescale_sums", storage(inputs), (sums, own_maxima, maxima))
    sums, target_logits = tp_group.sum(both.reshape(-1)).reshape(2, N)
    launch_numbers(device, "losses_over_shards", storage(inputs), (losses, maxima, sums, target_logits))
    if exponentials is not None:
        gradient_of_shard(device, exponentials, targets, maxima, sums, known, scale)


def _logits(device, logits, inputs, wte):
    """Yield (rows, their logits (rows, Vp)): all rows at once in `logits`, or, if None, as many as fit in scratch."""
    if logits is not None:
        device.matmul(logits, inputs, wte.T)
        yield slice(0, len(inputs)), logits
        return
    count = max(1, min(len(inputs), LOGITS_BYTES // (len(wte) * inputs.itemsize)))
    for start in range(0, len(inputs), count):
        rows = slice(start, start + count)
        logits = device.scratch("logits", (len(inputs[rows]), len(wte)), inputs.dtype)
        device.matmul(logits, inputs[rows], wte.T)
        yield rows, logits


def cross_entropy(device, losses, logits, targets, vocab_size, scale, with_gradient):
    """Set losses (N,) float32 of logits (N, Vp) for device targets (N,); with_gradient: logits = dlogits * scale."""
    arguments = (losses, logits, targets, *int32(vocab_size, logits.shape[1]), np.float32(scale))
    _launch_rows(device, "cross_entropy", logits, (*arguments, np.int32(with_gradient)))


def row_statistics(device, maxima, sums, target_logits, logits, targets, known):
    """Compute each row's largest logit, sum of exp(logit - largest) and target logit, all (N,) float32, from a shard's
    logits (N, Vp), of which `known` columns count. targets are columns of the shard; targets elsewhere have logit 0."""
    arguments = (maxima, sums, target_logits, logits, targets, *int32(known, logits.shape[1]))
    _launch_rows(device, "row_statistics", logits, arguments)


def gradient_of_shard(device, logits, targets, maxima, sums, known, scale):
    """Turn a shard's logits (N, Vp) into dlogits * scale, with maxima and sums (N,) of all shards."""
    arguments = (logits, targets, maxima, sums, *int32(known, logits.shape[1]), np.float32(scale))
    _launch_rows(device, "gradient_of_shard", logits, arguments)


def _launch_rows(device, kernel, logits, arguments):
    """Launch a block for each row."""
    device.launch("classifier", storage(logits), kernel, (len(logits),), (ROW_THREADS,), arguments)


def launch_numbers(device, kernel, kind, arrays):
    """Launch a thread for each number of arrays (N,). kind: the storage, which decides how exponentials are computed.

    rescale_sums(sums, own_maxima, maxima) turns sums of exp(logit - own_maxima) into sums of exp(logit - maxima).
    losses_over_shards(losses, maxima, sums, target_logits) computes the losses from the numbers of all shards.
    """
    count = len(arrays[0])
    grid = (math.ceil(count / THREADS),)
    device.launch("classifier", kind, kernel, grid, (THREADS,), (*arrays, *int32(count)))
