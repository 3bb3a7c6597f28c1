"""Reverse-mode differentiation of recorded functions.

How gradients accumulate
------------------------
Every Variable has at most one gradient buffer, of its own shape and dtype. A function's backward is given
the buffers that its inputs already have (`targets`) and *adds* to them; where an input has none yet, it
answers with a new array, which becomes the buffer. So a Variable that several calls use is never summed on
the side: the next backward adds (a kernel: atomically) into what the one before wrote. Only where a Variable
stands twice among the inputs of *one* call does the second place get no buffer, and the tape adds its answer.
Each addition rounds to the Variable's dtype, as PyTorch's do.

A leaf keeps its buffer as `.grad`. The buffer of a computed Variable is dropped as soon as the node that
computed it has used it, and with it, unless `retain_graph`, the arrays that the node had saved. After an
error, leaves keep what was added before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import html
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from psa_cupy.arguments import (
    cupy_if_imported,
    is_cupy,
    require_arrays,
    require_dtype,
    require_target,
    share_memory,
)

_active_tape: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("active_tape", default=None)


class Variable:
    """An array that a tape differentiates with respect to.

    Parameters
    ----------
    data : array
        float16, bfloat16, float32 or float64; NumPy or CuPy. Kept by reference: do not change it between
        recording and backward.
    requires_grad : bool
        Whether gradients flow to it; without, it is a constant.

    Attributes
    ----------
    data : array
        As given.
    requires_grad : bool
        As given; False for what was computed without being recorded.

    Raises
    ------
    TypeError
        If data is no array, or its dtype is not supported, or requires_grad is no bool.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> autograd.Variable(np.zeros((2, 3), np.float32))
    Variable(shape=(2, 3), dtype=float32, leaf, no grad)

    """

    __slots__ = ("_gradient", "_node", "data", "requires_grad")

    def __init__(self, data, requires_grad: bool = True):
        require_arrays("Variable", {"data": data})
        require_dtype("Variable", "data", data)
        _require_bool("Variable", "requires_grad", requires_grad)
        self.data = data
        self.requires_grad = bool(requires_grad)
        self._gradient = _Gradient(data)
        self._node: _Node | None = None

    @property
    def grad(self):
        """The gradient accumulated so far, of data's shape and dtype, or None; only leaves keep one."""
        return self._gradient.buffer

    @property
    def shape(self) -> tuple[int, ...]:
        """Data's shape."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Data's dtype."""
        return self.data.dtype

    def __repr__(self) -> str:
        leaf = "leaf" if self.requires_grad else "constant"
        producer = leaf if self._node is None else f"from {self._node.name}"
        held = "no grad" if self.grad is None else "grad held"
        return f"Variable(shape={self.shape}, dtype={self.dtype}, {producer}, {held})"


class _Gradient:
    """Where a Variable's gradient accumulates. Nodes refer to this, so they do not keep data alive."""

    __slots__ = ("buffer", "dtype", "shape")

    def __init__(self, data):
        self.shape, self.dtype = data.shape, data.dtype
        self.buffer = None

    def take(self):
        """The buffer, which is no longer held here."""
        buffer, self.buffer = self.buffer, None
        return buffer

    def accept(self, gradient) -> None:
        """Take note of what a backward answered: this buffer, added to, or a new array."""
        if self.buffer is None:
            self.buffer = gradient
        elif gradient is not self.buffer:  # the same Variable stands twice among this call's inputs
            with np.errstate(all="ignore"):
                self.buffer += gradient

    def require_answer(self, function: str, name: str, target, gradient) -> None:
        """Check what a backward answered for an input that it had given `target` for."""
        if target is None:  # a new array, which will be a target
            require_arrays(function, {name: gradient})
            require_dtype(function, name, gradient, self.dtype)
            require_target(function, name, gradient, self.shape, self.dtype)
        elif gradient is not target:
            raise RuntimeError(f"{function}: {name} is another array than the target to add to")


class _Node:
    """One recorded call: what its backward needs, until that has run."""

    __slots__ = ("backward", "checksums", "inputs", "name", "outputs", "position", "saved")

    def __init__(self, name, position, inputs, outputs, saved, backward, check):
        self.name, self.position = name, position
        self.inputs: tuple[_Gradient | None, ...] = inputs  # None: a constant
        self.outputs: tuple[_Gradient, ...] = outputs
        self.saved, self.backward = saved, backward
        self.checksums = tuple(map(_checksum, saved)) if check else None

    @property
    def done(self) -> bool:
        """Whether what backward needs has been freed."""
        return self.backward is None

    def run_backward(self, retain_graph: bool) -> None:
        """Pull the outputs' gradients back to the inputs' buffers."""
        self._require_unchanged()
        d_outputs = tuple(output.take() for output in self.outputs)
        targets = self._targets()
        answers = self._answers(targets, self.backward(self.saved, d_outputs, targets))
        self._require_apart(targets, answers)
        for wanted, answer in zip(self.inputs, answers, strict=True):
            if wanted is not None:
                wanted.accept(answer)
        if not retain_graph:
            self.saved = self.backward = None

    def _answers(self, targets, gradients) -> list:
        """What backward gave, checked, one array per input; None for a constant."""
        if not isinstance(gradients, tuple) or len(gradients) != len(self.inputs):
            raise TypeError(
                f"{self.name}: its backward gave {_count(gradients)}, "
                f"expected a tuple of {len(self.inputs)}, one gradient per input"
            )
        answers = [
            None if wanted is None else _no_scalar(gradient)
            for wanted, gradient in zip(self.inputs, gradients, strict=True)
        ]
        for index, (wanted, target, answer) in enumerate(zip(self.inputs, targets, answers, strict=True)):
            if wanted is not None:
                wanted.require_answer(self.name, f"its backward's gradient {index}", target, answer)
        return answers

    def _require_apart(self, targets, answers) -> None:
        """Check that answers share no memory: what is added to one later would change the other."""
        gradients = [(f"gradient {i}", answer) for i, answer in enumerate(answers) if answer is not None]
        new = [(name, answer) for name, answer in gradients if not any(answer is t for t in targets)]
        saved = [(f"saved array {i}", array) for i, array in enumerate(self.saved)]
        pairs = itertools.chain(itertools.combinations(gradients, 2), itertools.product(new, saved))
        for (name, gradient), (other_name, other) in pairs:
            if is_cupy(gradient) == is_cupy(other) and share_memory(gradient, other):
                raise RuntimeError(
                    f"{self.name}: its backward's {name} shares memory with {other_name}, "
                    "expected a new array for each input"
                )

    def _targets(self) -> tuple:
        """Each input's gradient buffer; one that occurs twice in this call is given out once."""
        targets, given = [], set()
        for wanted in self.inputs:
            fresh = wanted is not None and wanted not in given
            targets.append(wanted.buffer if fresh else None)
            given.add(wanted)
        return tuple(targets)

    def _require_unchanged(self) -> None:
        if self.checksums is None:
            return
        for index, (array, checksum) in enumerate(zip(self.saved, self.checksums, strict=True)):
            if _checksum(array) != checksum:
                raise RuntimeError(
                    f"{self.name}: saved array {index} (shape {array.shape}) was changed between recording "
                    "and backward; expected the values that were recorded"
                )


class Tape:
    """Records functions of Variables inside a `with` block and differentiates what they computed.

    Parameters
    ----------
    check : bool
        Keep a checksum of every saved array and raise if one was changed before its backward. It copies
        each array to the host, which synchronises: for debugging.

    Raises
    ------
    TypeError
        If check is no bool.
    RuntimeError
        On leaving it, if another tape or `no_grad` was entered after it and not left: it is still entered.

    Notes
    -----
    Memory: recording keeps what each function saves for its backward, by reference. `backward` frees a
    node's saved arrays when the node is done, and holds at most one gradient for each leaf and for each
    computed Variable between the node at work and the output; beside these, what one backward allocates.

    One thread at a time uses a tape; several threads may use one each.

    CUDA graphs: what a tape frees on its way goes back to CuPy's memory pool, but a replay writes there
    again. Capture a tape only with a memory pool of its own (`cupy.cuda.using_allocator`) that lives as long
    as the graph.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> with autograd.Tape() as tape:
    ...     x = tape.variable(np.array([1.0, 2.0, 3.0]))
    ...     y = autograd.sum(autograd.multiply(x, x))
    >>> tape.backward(y)
    >>> x.grad
    array([2., 4., 6.])

    """

    def __init__(self, *, check: bool = False):
        _require_bool("Tape", "check", check)
        self.check = check
        self._nodes: list[_Node] = []
        self._leaves: set[_Gradient] = set()
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> Tape:
        self._tokens.append(_active_tape.set(self))
        return self

    def __exit__(self, *exception) -> None:
        if not self._tokens:
            raise RuntimeError("Tape.__exit__: the tape is not recording, expected __enter__ before it")
        if _active_tape.get() is not self:  # else this tape would record on when the other one is left
            raise RuntimeError(
                "Tape.__exit__: another tape or no_grad() is in force, "
                "expected the last entered to be left first"
            )
        _active_tape.reset(self._tokens.pop())

    def variable(self, data, requires_grad: bool = True) -> Variable:
        """A new leaf, `Variable(data, requires_grad)`, whose gradient `zero` forgets."""
        leaf = Variable(data, requires_grad)
        self._leaves.add(leaf._gradient)
        return leaf

    def backward(self, y: Variable, d_y=None, *, retain_graph: bool = False) -> None:
        """Add the gradient of y to `.grad` of every leaf that y was computed from.

        Parameters
        ----------
        y : Variable
            What this tape computed.
        d_y : array, optional
            The gradient with respect to y, of its shape and dtype; 1 if y has one element. Copied.
        retain_graph : bool
            Keep the saved arrays, so that another backward may pass the same nodes.

        Raises
        ------
        TypeError
            If y is no Variable or d_y no array of y's kind and dtype.
        ValueError
            If d_y has another shape than y, or is missing though y has more than one element.
        RuntimeError
            If this tape did not record y, a node on the way has freed what it saved (before anything is
            added), or another tape is recording: that would be differentiating twice, which no function
            here supports.

        """
        self._require_recorded(y)
        path = self._path_to(y)
        try:
            with no_grad(), device_of(y.data):
                y._gradient.buffer = _seed(y, d_y)
                for node in path:
                    node.run_backward(retain_graph)
        finally:  # after an error, nothing half-summed may wait for the next backward
            for node in path:
                for output in node.outputs:
                    output.buffer = None

    def zero(self) -> None:
        """Forget the gradients of all leaves: their `.grad` becomes None."""
        for gradient in self._leaves:
            gradient.buffer = None

    def reset(self) -> None:
        """Forget gradients and what was recorded, so that the tape can be used for the next step."""
        self.zero()
        self._leaves.clear()
        self._nodes.clear()

    def __repr__(self) -> str:
        freed = sum(node.done for node in self._nodes)
        return f"Tape({len(self._nodes)} nodes, {freed} of them freed)"

    def _repr_html_(self) -> str:
        rows = [("", "function", "inputs", "outputs", "kept for backward")]
        rows += [
            (str(node.position), node.name, _shapes(node.inputs), _shapes(node.outputs), _kept(node))
            for node in self._nodes
        ]
        head, *body = (
            "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in row) + "</tr>"
            for cell, row in zip(["th"] + ["td"] * len(self._nodes), rows, strict=True)
        )
        return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"

    def _holds(self, node: _Node) -> bool:
        return node.position < len(self._nodes) and self._nodes[node.position] is node

    def _require_recorded(self, y) -> None:
        if not isinstance(y, Variable):
            raise TypeError(f"Tape.backward: y is a {type(y).__name__}, expected a Variable")
        if y._node is None or not self._holds(y._node):
            raise RuntimeError(
                f"Tape.backward: y is {y!r}, expected what this tape recorded since its last reset"
            )
        if _active_tape.get() not in (None, self):
            raise RuntimeError(
                f"Tape.backward: another tape is recording, but {y._node.name} cannot be differentiated "
                "twice; expected no_grad() around this backward"
            )

    def _path_to(self, y: Variable) -> list[_Node]:
        """The nodes that y was computed by, the last one first."""
        reached, path = {y._gradient}, []
        for node in reversed(self._nodes[: y._node.position + 1]):
            if reached.isdisjoint(node.outputs):
                continue
            if node.done:
                raise RuntimeError(
                    f"Tape.backward: {node.name} has freed what it saved; expected retain_graph=True in the "
                    "backward before this one"
                )
            reached.update(node.inputs)
            path.append(node)
        return path


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Inside, functions compute without being recorded; their results require no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> x = autograd.Variable(np.ones(3))
    >>> with autograd.Tape(), autograd.no_grad():
    ...     autograd.add(x, x)
    Variable(shape=(3,), dtype=float64, constant, no grad)

    """
    token = _active_tape.set(None)
    try:
        yield
    finally:
        _active_tape.reset(token)


def record(
    name: str,
    inputs: Sequence[object],
    outputs: Sequence[object],
    saved: Sequence[object],
    backward: Callable,
) -> tuple[Variable, ...]:
    """Make Variables of computed arrays and put their backward on the active tape.

    Parameters
    ----------
    name : str
        The function's name, for tables and messages.
    inputs : tuple or list of Variable or other
        The function's differentiable arguments; what is no Variable is a constant.
    outputs : tuple or list of array
        What it computed.
    saved : tuple or list of array
        What its backward needs; kept by reference and freed after use.
    backward : callable
        `backward(saved, d_outputs, targets)` gives a tuple of one gradient per input. `d_outputs` has the
        gradient of each output (None: nothing reached it; at least one is an array). `targets` has, per
        input, an array to add the gradient to and to give back, or None, which asks for a new array in C
        order that shares memory with nothing, since it will be added to. (An array of `d_outputs` is no
        longer needed and may be one of these. A constant is asked for a gradient too, which is dropped.)

        NumPy's arithmetic answers with scalars on 0-d arrays: outputs, saved arrays and new gradients may be
        such.

    Returns
    -------
    tuple of Variable
        One per output. Without an active tape, or if no input requires a gradient, they are constants.

    Raises
    ------
    TypeError
        If inputs, outputs or saved is no tuple or list, an output or what is saved is no array, or backward
        cannot be called.
    RuntimeError
        If an input was computed on another tape, or before this one's reset.
    TypeError, ValueError, RuntimeError
        From `Tape.backward`, naming the function, if its backward gives anything else than described: the
        memory of a new array is compared with the other gradients of the call and what was saved.

    Examples
    --------
    A function in ten lines:

    >>> import numpy as np
    >>> from psa_cupy import autograd
    >>> def square(x):
    ...     (y,) = autograd.record("square", (x,), (x.data**2,), (x.data,), square_backward)
    ...     return y
    >>> def square_backward(saved, d_outputs, targets):
    ...     (x,), (d_y,), (d_x,) = saved, d_outputs, targets
    ...     if d_x is None:
    ...         return (2 * x * d_y,)
    ...     d_x += 2 * x * d_y
    ...     return (d_x,)
    >>> with autograd.Tape() as tape:
    ...     x = tape.variable(np.array([3.0]))
    ...     y = square(x)
    >>> tape.backward(y)
    >>> x.grad
    array([6.])

    """
    for what, values in {"inputs": inputs, "outputs": outputs, "saved": saved}.items():
        if not isinstance(values, (tuple, list)):
            raise TypeError(f"{name}: {what} is a {type(values).__name__}, expected a tuple or list")
    if not callable(backward):
        raise TypeError(f"{name}: backward is a {type(backward).__name__}, expected a function")
    outputs, saved = _arrays(name, "output", outputs), _arrays(name, "saved array", saved)
    tape = _active_tape.get()
    wanted = tuple(x if isinstance(x, Variable) and x.requires_grad else None for x in inputs)
    if tape is None or not any(wanted):
        return tuple(Variable(array, requires_grad=False) for array in outputs)
    for x in filter(None, wanted):
        if x._node is None:
            tape._leaves.add(x._gradient)
        elif not tape._holds(x._node):
            raise RuntimeError(
                f"{name}: an input is {x!r} on another tape or before reset(), "
                "expected Variables of the tape that records"
            )
    variables = tuple(map(Variable, outputs))
    node = _Node(
        name,
        len(tape._nodes),
        tuple(None if x is None else x._gradient for x in wanted),
        tuple(y._gradient for y in variables),
        saved,
        backward,
        tape.check,
    )
    tape._nodes.append(node)
    for variable in variables:
        variable._node = node
    return variables


def device_of(array) -> contextlib.AbstractContextManager:
    """Inside, CuPy works on the array's device; nothing for NumPy."""
    return array.device if is_cupy(array) else contextlib.nullcontext()


def _arrays(function: str, what: str, values) -> tuple:
    """The values, checked to be arrays of any dtype."""
    arrays = tuple(map(_no_scalar, values))
    for index, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) and not is_cupy(array):
            raise TypeError(
                f"{function}: {what} {index} is a {type(array).__name__}, expected a NumPy or CuPy array"
            )
    return arrays


def _no_scalar(value):
    """The 0-d array of a NumPy scalar; anything else as it is."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def _require_bool(function: str, name: str, value) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}, expected True or False")


def _seed(y: Variable, d_y):
    """A new array holding the gradient to start from."""
    xp = cupy_if_imported() if is_cupy(y.data) else np
    d_y = _no_scalar(d_y)
    if d_y is None:
        if y.data.size != 1:
            raise ValueError(
                f"Tape.backward: y has shape {y.shape} and no d_y, expected d_y unless y has one element"
            )
        return xp.ones(y.shape, y.dtype)
    if isinstance(d_y, Variable):
        raise TypeError(
            "Tape.backward: d_y is a Variable, expected an array: "
            f"{y._node.name} cannot be differentiated twice"
        )
    require_arrays("Tape.backward", {"y": y.data, "d_y": d_y})
    if d_y.dtype != y.dtype:
        raise TypeError(f"Tape.backward: d_y has dtype {d_y.dtype}, expected {y.dtype}")
    if d_y.shape != y.shape:
        raise ValueError(f"Tape.backward: d_y has shape {d_y.shape}, expected {y.shape}")
    return xp.array(d_y, order="C")


def _count(gradients) -> str:
    return f"{len(gradients)} gradients" if isinstance(gradients, tuple) else f"a {type(gradients).__name__}"


def _shapes(gradients: Sequence[_Gradient | None]) -> str:
    return ", ".join("constant" if g is None else f"{g.shape} {g.dtype}" for g in gradients)


def _kept(node: _Node) -> str:
    return "freed" if node.done else f"{sum(array.nbytes for array in node.saved):,} bytes"


def _checksum(array) -> bytes:
    host = cupy_if_imported().asnumpy(array) if is_cupy(array) else array
    return hashlib.blake2b(np.ascontiguousarray(host).view(np.uint8), digest_size=16).digest()
