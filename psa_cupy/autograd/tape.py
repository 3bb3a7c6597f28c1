"""Reverse-mode differentiation of recorded functions.

How gradients accumulate
------------------------
Every Variable has at most one gradient buffer, of its own shape and dtype. A function's backward is given
the buffers its inputs already have (`targets`) and *adds* to them; where an input has none yet, it answers
with a new array, which becomes the buffer. So a Variable used twice is never summed on the side: the
second backward kernel adds, atomically, into what the first one wrote. Each addition rounds to the
Variable's dtype, as PyTorch's do.

A leaf keeps its buffer as `.grad`. The buffer of a computed Variable lives in the node that produced it
and is dropped as soon as that node has used it, together with the arrays the node had saved.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import html
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from psa_cupy.arguments import cupy_if_imported, is_cupy

_active_tape: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("active_tape", default=None)


class Variable:
    """An array that a tape differentiates with respect to.

    Parameters
    ----------
    data : array
        NumPy or CuPy; kept by reference, so do not change it between recording and backward.
    requires_grad : bool
        Whether gradients flow to it.

    Attributes
    ----------
    grad : array or None
        The gradient accumulated so far, of data's shape and dtype; only leaves (Variables that no
        recorded function produced) keep one.

    Examples
    --------
    >>> import numpy as np
    >>> Variable(np.zeros((2, 3), np.float32))
    Variable(shape=(2, 3), dtype=float32, leaf, no grad)

    """

    __slots__ = ("_index", "_node", "data", "grad", "requires_grad")

    def __init__(self, data, requires_grad: bool = True):
        if not isinstance(data, np.ndarray) and not is_cupy(data):
            raise TypeError(f"Variable: data is a {type(data).__name__}, expected a NumPy or CuPy array")
        self.data = data
        self.grad = None
        self.requires_grad = requires_grad
        self._node: _Node | None = None
        self._index = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Data's shape."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        """Data's dtype."""
        return self.data.dtype

    def __repr__(self) -> str:
        producer = "leaf" if self._node is None else f"from {self._node.name}"
        held = "no grad" if self._gradient() is None else "grad held"
        return f"Variable(shape={self.shape}, dtype={self.dtype}, {producer}, {held})"

    def _gradient(self):
        return self.grad if self._node is None else self._node.d_outputs[self._index]

    def _set_gradient(self, gradient) -> None:
        if self._node is None:
            self.grad = gradient
        else:
            self._node.d_outputs[self._index] = gradient


class _Node:
    """One recorded call: what its backward needs, until that has run."""

    __slots__ = ("backward", "checksums", "d_outputs", "done", "inputs", "name", "saved", "shapes", "tape")

    def __init__(self, tape, name, inputs, output_arrays, saved, backward):
        self.tape, self.name, self.inputs = tape, name, inputs
        self.saved, self.backward = saved, backward
        self.checksums = tuple(map(_checksum, saved)) if tape.check else None
        self.d_outputs = [None] * len(output_arrays)
        self.shapes = _describe(inputs), _describe(output_arrays)
        self.done = False

    def run_backward(self, retain_graph: bool) -> None:
        """Pull the outputs' gradients back to the inputs' buffers."""
        self._require_unchanged()
        d_outputs, self.d_outputs = tuple(self.d_outputs), [None] * len(self.d_outputs)
        targets = self._targets()
        gradients = self.backward(self.saved, d_outputs, targets)
        for variable, target, gradient in zip(self.inputs, targets, gradients, strict=True):
            if _wants_gradient(variable) and target is None:
                self._deposit(variable, gradient)
        if not retain_graph:
            self.saved = self.backward = self.inputs = None
            self.done = True

    def _targets(self) -> tuple:
        """Each input's gradient buffer; one that occurs twice in this call is given out once."""
        targets, given = [], set()
        for variable in self.inputs:
            fresh = _wants_gradient(variable) and id(variable) not in given
            targets.append(variable._gradient() if fresh else None)
            given.add(id(variable))
        return tuple(targets)

    def _deposit(self, variable: Variable, gradient) -> None:
        if gradient.shape != variable.shape or gradient.dtype != variable.dtype:
            raise ValueError(
                f"{self.name}: its backward gave a gradient of shape {gradient.shape}, {gradient.dtype}, "
                f"expected {variable.shape}, {variable.dtype}"
            )
        buffer = variable._gradient()
        if buffer is None:
            variable._set_gradient(gradient)
        else:  # the same Variable stands twice among this call's inputs
            buffer += gradient

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

    Notes
    -----
    Recorded arrays are kept by reference. `backward` frees what a node saved as soon as the node is done,
    so at most one gradient per Variable still to be visited is alive at a time. Calling `backward` for
    several outputs adds up on the leaves until `zero`.

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
        self.check = check
        self._nodes: list[_Node] = []
        self._leaves: dict[int, Variable] = {}
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> Tape:
        self._tokens.append(_active_tape.set(self))
        return self

    def __exit__(self, *exception) -> None:
        _active_tape.reset(self._tokens.pop())

    def variable(self, data, requires_grad: bool = True) -> Variable:
        """A leaf on this tape: `Variable(data)`, whose gradient `zero` clears."""
        leaf = Variable(data, requires_grad)
        self._leaves[id(leaf)] = leaf
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
            If y is no Variable or d_y no array of y's kind and dtype. A d_y that is a Variable would be
            differentiating twice, which no function here supports.
        ValueError
            If d_y has another shape than y, or is missing though y has more than one element.
        RuntimeError
            If y was not recorded by this tape, or a node has freed what it saved.

        """
        self._require_output(y)
        seed = _seed(y, d_y)
        stop = self._position(y._node)
        buffer = y._gradient()
        if buffer is None:
            y._set_gradient(seed)
        else:
            buffer += seed
        for node in reversed(self._nodes[: stop + 1]):
            if all(gradient is None for gradient in node.d_outputs):
                continue
            if node.done:
                raise RuntimeError(
                    f"Tape.backward: {node.name} has freed what it saved; expected retain_graph=True in the "
                    "backward before this one"
                )
            node.run_backward(retain_graph)

    def zero(self) -> None:
        """Forget the gradients of all leaves: their `.grad` becomes None."""
        for leaf in self._leaves.values():
            leaf.grad = None

    def reset(self) -> None:
        """Forget what was recorded, so that the tape can be used for the next step."""
        self._nodes.clear()
        self._leaves.clear()

    def __repr__(self) -> str:
        done = builtin_sum(node.done for node in self._nodes)
        return f"Tape({len(self._nodes)} nodes, {done} of them freed)"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{i}</td><td>{html.escape(n.name)}</td><td>{html.escape(n.shapes[0])}</td>"
            f"<td>{html.escape(n.shapes[1])}</td><td>{'freed' if n.done else 'saved'}</td></tr>"
            for i, n in enumerate(self._nodes)
        )
        head = "".join(f"<th>{title}</th>" for title in ("", "function", "inputs", "outputs", "arrays"))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _require_output(self, y) -> None:
        if not isinstance(y, Variable):
            raise TypeError(f"Tape.backward: y is a {type(y).__name__}, expected a Variable")
        if y._node is None or y._node.tape is not self:
            raise RuntimeError("Tape.backward: y was not computed on this tape, expected a recorded Variable")

    def _position(self, node: _Node) -> int:
        for position in range(len(self._nodes) - 1, -1, -1):
            if self._nodes[position] is node:
                return position
        raise RuntimeError("Tape.backward: y's record is gone; expected no reset() before backward")


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Inside, functions compute without being recorded; their results require no gradient."""
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
    inputs : sequence of Variable or other
        The function's differentiable arguments; what is no Variable is a constant.
    outputs : sequence of array
        What it computed.
    saved : sequence of array
        What its backward needs; kept by reference and freed after use.
    backward : callable
        `backward(saved, d_outputs, targets)` gives one gradient per input. `d_outputs` has the gradient
        of each output (None: nothing reached it; at least one is an array). `targets` has, per input, an
        array to add the gradient to and to return, or None, which asks for a new array.

    Returns
    -------
    tuple of Variable
        One per output. Without an active tape, or if no input requires a gradient, they are constants.

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
    tape = _active_tape.get()
    recorded = tape is not None and any(map(_wants_gradient, inputs))
    variables = tuple(Variable(array, requires_grad=recorded) for array in outputs)
    if recorded:
        node = _Node(tape, name, tuple(inputs), tuple(outputs), tuple(saved), backward)
        tape._nodes.append(node)
        for index, variable in enumerate(variables):
            variable._node, variable._index = node, index
        leaves = (v for v in inputs if _wants_gradient(v) and v._node is None)
        tape._leaves.update((id(leaf), leaf) for leaf in leaves)
    return variables


builtin_sum = sum  # functions.sum has the same name; this one adds Python numbers


def _wants_gradient(value: object) -> bool:
    return isinstance(value, Variable) and value.requires_grad


def _seed(y: Variable, d_y):
    """A new array holding the gradient to start from."""
    name = y._node.name
    xp = cupy_if_imported() if is_cupy(y.data) else np
    if d_y is None:
        if y.data.size != 1:
            raise ValueError(
                f"Tape.backward: y has shape {y.shape} and no d_y, expected d_y unless y has one element"
            )
        return xp.ones_like(y.data)
    if isinstance(d_y, Variable):
        raise TypeError(
            f"Tape.backward: d_y is a Variable, expected an array: {name} cannot be differentiated twice"
        )
    if type(d_y) is not type(y.data):
        raise TypeError(
            f"Tape.backward: d_y is a {type(d_y).__name__}, expected a {type(y.data).__name__} like {name}'s result"
        )
    if d_y.dtype != y.dtype:
        raise TypeError(f"Tape.backward: d_y has dtype {d_y.dtype}, expected {y.dtype}")
    if d_y.shape != y.shape:
        raise ValueError(f"Tape.backward: d_y has shape {d_y.shape}, expected {y.shape}")
    return xp.array(d_y, order="C", copy=True)


def _describe(values: Sequence[object]) -> str:
    return ", ".join(f"{v.shape} {v.dtype}" if hasattr(v, "shape") else repr(v) for v in values)


def _checksum(array) -> bytes:
    host = cupy_if_imported().asnumpy(array) if is_cupy(array) else array
    return hashlib.blake2b(np.ascontiguousarray(host).view(np.uint8), digest_size=16).digest()
