"""cuDNN's causal attention for bfloat16, through nvidia-cudnn-frontend.

A graph is built once for each shape, and run with {operand number: address}. Queries, keys and values are strided views
of the packed (B, T, 3C) array, so nothing is transposed. As in our own kernels, logsumexp is a natural logarithm.
"""

from gpt2.errors import UserError
from gpt2.kernels.cupy.matmul import address

INSTALL = "pip install nvidia-cudnn-cu13 nvidia-cudnn-frontend==1.28.0"
QUERIES, KEYS, VALUES, OUT, STATISTICS, DOUT, DQUERIES, DKEYS, DVALUES = range(1, 10)


class CudnnAttention:
    """cuDNN's attention on one device. RuntimeError: cuDNN does not support a shape.

    Backward gives the same bits every time; cuDNN needs a workspace for that.
    """

    def __init__(self, device):
        self._device = device
        self._graphs = {}
        try:
            import cudnn

            self._handle = cudnn.create_handle()
            self.version = int(cudnn.backend_version())
            cudnn.set_stream(handle=self._handle, stream=device.stream.ptr)
        except Exception as error:  # the frontend or its library is missing; also AssertionError
            raise UserError(
                f"no cuDNN ({error}), expected it and its frontend: {INSTALL}, or use the project's own attention"
            ) from None
        self._cudnn = cudnn

    def forward(self, out, logsumexp, qkv, head_count) -> None:
        """Run gpt2.kernels.cupy.attention.attention_forward with cuDNN."""
        addresses = _thirds(qkv, QUERIES) | {OUT: address(out), STATISTICS: address(logsumexp)}
        self._execute("forward", out.shape, head_count, addresses)

    def backward(self, dqkv, dout, qkv, out, logsumexp, head_count) -> None:
        """Run gpt2.kernels.cupy.attention.attention_backward with cuDNN."""
        addresses = _thirds(qkv, QUERIES) | _thirds(dqkv, DQUERIES)
        addresses |= {OUT: address(out), STATISTICS: address(logsumexp), DOUT: address(dout)}
        self._execute("backward", out.shape, head_count, addresses)

    def _execute(self, direction, shape, head_count, addresses):
        key = direction, shape, head_count
        if key not in self._graphs:
            self._graphs[key] = self._build(direction == "backward", shape, head_count)
        graph = self._graphs[key]
        workspace = self._device.workspace("cudnn", graph.get_workspace_size())
        graph.execute(addresses, address(workspace), handle=self._handle)

    def _build(self, is_backward, shape, head_count):
        """Build, validate and plan a graph. This takes seconds."""
        graph = new_graph(self._cudnn, is_backward, shape, head_count, handle=self._handle)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self._cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
        except self._cudnn.cudnnGraphNotSupportedError as error:  # cuDNN's other exceptions are RuntimeErrors
            raise RuntimeError(f"cuDNN has no attention for {shape}, {head_count} heads: {error}") from None
        return graph


def new_graph(cudnn, is_backward, shape, head_count, **options):
    """Return the graph of one direction, not yet validated. cuDNN's dimensions are (B, H, T, D)."""
    B, T, C = shape
    D = C // head_count
    half = cudnn.data_type.BFLOAT16
    single = cudnn.data_type.FLOAT
    dimensions = [B, head_count, T, D]
    packed = [T * 3 * C, D, 3 * C, 1]
    plain = [T * C, D, C, 1]
    rows = [B, head_count, T, 1]
    row_strides = [head_count * T, T, 1, 1]
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=single, compute_data_type=single, **options)

    def tensor(name, uid, dim, stride, data_type=half):
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=data_type, uid=uid)

    causal = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
    options = {"attn_scale": D**-0.5, **causal}
    q, k, v = (tensor(name, uid, dimensions, packed) for uid, name in enumerate("qkv", QUERIES))
    if not is_backward:
        out, statistics = graph.sdpa(q=q, k=k, v=v, generate_stats=True, name="forward", **options)
        _output(out, OUT, dimensions, plain)
        _output(statistics, STATISTICS, rows, row_strides).set_data_type(single)
        return graph
    out, dout = (tensor(name, uid, dimensions, plain) for name, uid in (("out", OUT), ("dout", DOUT)))
    statistics = tensor("statistics", STATISTICS, rows, row_strides, single)
    gradients = graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=dout, stats=statistics, use_deterministic_algorithm=True, name="backward",
        **options,
    )  # fmt: skip
    for uid, gradient in zip((DQUERIES, DKEYS, DVALUES), gradients, strict=True):
        _output(gradient, uid, dimensions, packed)
    return graph


def _output(tensor, uid, dimensions, strides):
    return tensor.set_output(True).set_dim(dimensions).set_stride(strides).set_uid(uid)


def _thirds(packed, first_number):
    """Return {number: address} of queries, keys and values in a packed (B, T, 3C) array."""
    third_bytes = packed.shape[2] // 3 * packed.itemsize
    return {first_number + third: address(packed) + third * third_bytes for third in range(3)}
