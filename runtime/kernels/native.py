"""A small compiler from a subset of Python, where every value is an int64, to native code through llvmlite.

It exists for the control flow of the CPU kernels (`layer.py`): no C compiler may be needed, and numba takes half a minute
for the same functions on a small machine, where this takes a fraction of a second, and costs 60 MB less.

The subset: functions of int64 that return an int64 or nothing; assignments (also of tuples), `while`, `for ... in
range(...)` with a constant step, `if`, `break`, `return`; + - * & | <<, // and % (of values that are not negative),
comparisons, `and`, `or`, `not`, `a if c else b`, `min`, `max` of two; integer constants of the module; calls of other
functions of the subset and of the operations below. Anything else is refused when it is compiled.
"""

import ast
import inspect
import platform
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import binding, ir

i16, i32, i64 = (ir.IntType(n) for n in (16, 32, 64))


def _pointer(b: ir.IRBuilder, address: ir.Value, of: ir.Type = i64) -> ir.Value:
    return b.inttoptr(address, of.as_pointer())


def _call(returns: ir.Type, arguments: Sequence[ir.Type]) -> Callable[..., ir.Value | None]:
    """Code that calls the C function at the address given first."""

    def code(b: ir.IRBuilder, address: ir.Value, *values: ir.Value) -> ir.Value | None:
        function = _pointer(b, address, ir.FunctionType(returns, arguments))
        result = b.call(function, [v if v.type == t else b.trunc(v, t) for v, t in zip(values, arguments, strict=True)])
        return result if returns == i64 else None

    return code


def _store(of: ir.Type) -> Callable[..., None]:
    def code(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
        b.store(value if of == i64 else b.trunc(value, of), _pointer(b, address, of), align=1)

    return code


def _swap_if(b: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    pair = b.cmpxchg(_pointer(b, address), expected, value, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(pair, 1), i64)


def _pause(b: ir.IRBuilder) -> None:
    """The processor's hint that this is a waiting loop, where it has one."""
    machine = platform.machine()
    name, arguments = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [i32(1)])}.get(
        machine, ("", [])
    )
    if name:
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        b.call(function, arguments)


OPERATIONS: dict[str, Callable[..., ir.Value | None]] = {
    "get": lambda b, p: b.load(_pointer(b, p), align=1),
    "get_short": lambda b, p: b.zext(b.load(_pointer(b, p, i16), align=1), i64),
    "put": _store(i64),
    "put_word": _store(i32),
    "put_short": _store(i16),
    "take": lambda b, p: b.atomic_rmw("add", _pointer(b, p), i64(1), "monotonic"),
    "min": lambda b, x, y: b.select(b.icmp_signed("<", y, x), y, x),
    "max": lambda b, x, y: b.select(b.icmp_signed(">", y, x), y, x),
    "get_now": lambda b, p: b.load_atomic(_pointer(b, p), "seq_cst", 8),
    "swap_now": lambda b, p, value: b.atomic_rmw("xchg", _pointer(b, p), value, "seq_cst"),
    "add_now": lambda b, p, value: b.atomic_rmw("add", _pointer(b, p), value, "seq_cst"),
    "swap_if": _swap_if,
    "pause": _pause,
    "call_parallel": _call(ir.VoidType(), (i64, i64, i32, i32)),
    "call_system": _call(i64, [i64] * 7),
    **{f"call_{n}": _call(ir.VoidType(), [i64] * n) for n in range(1, 8)},
}


# The operations' names, for the functions of the subset to import; they only mean something when compiled.
def get(address: int) -> int:
    """The int64 at an address."""
    raise NotImplementedError


def get_short(address: int) -> int:
    """The 16 bits at an address."""
    raise NotImplementedError


def put(address: int, value: int) -> None:
    """Store an int64."""
    raise NotImplementedError


def put_word(address: int, value: int) -> None:
    """Store the low 32 bits."""
    raise NotImplementedError


def put_short(address: int, value: int) -> None:
    """Store the low 16 bits."""
    raise NotImplementedError


def take(address: int) -> int:
    """The counter's value before one is added to it; any thread may call it at any time."""
    raise NotImplementedError


def get_now(address: int) -> int:
    """The int64 at an address that other threads change; in one order with all operations that end in `_now` or `_if`."""
    raise NotImplementedError


def swap_now(address: int, value: int) -> int:
    """Store an int64; returns what was there."""
    raise NotImplementedError


def add_now(address: int, value: int) -> int:
    """Add to an int64; returns what was there."""
    raise NotImplementedError


def swap_if(address: int, expected: int, value: int) -> int:
    """Store an int64 if `expected` is there; returns whether it was."""
    raise NotImplementedError


def pause() -> None:
    """One turn of a loop that waits for another thread."""
    raise NotImplementedError


def call_system(function: int, number: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
    """Call libc's `syscall`, at the address `function`."""
    raise NotImplementedError


def call_1(function: int, a: int) -> None:
    """Call `void f(int64_t)` at an address."""
    raise NotImplementedError


def call_parallel(function: int, work: int, data: int, threads: int, flags: int) -> None:
    """Call GOMP_parallel's kind of function at an address: `void f(void (*)(void *), void *, unsigned, unsigned)`."""
    raise NotImplementedError


def call_2(function: int, a: int, b: int) -> None:
    """Call `void f(int64_t, ...)` at an address; so do those that follow."""
    raise NotImplementedError


def call_3(function: int, a: int, b: int, c: int) -> None:
    raise NotImplementedError


def call_4(function: int, a: int, b: int, c: int, d: int) -> None:
    raise NotImplementedError


def call_5(function: int, a: int, b: int, c: int, d: int, e: int) -> None:
    raise NotImplementedError


def call_6(function: int, a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    raise NotImplementedError


def call_7(function: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
    raise NotImplementedError


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.LShift: "shl",
           ast.FloorDiv: "sdiv", ast.Mod: "srem"}  # fmt: skip
_COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


class _Function:
    """Emits one Python function. Variables live on the stack; LLVM puts them into registers."""

    def __init__(self, source: Callable[..., Any], function: ir.Function, others: dict[str, ir.Function]) -> None:
        self.name, self.globals, self.others = source.__name__, source.__globals__, others
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.variables: dict[str, ir.Value] = {}
        self.breaks: list[ir.Block] = []
        tree = ast.parse(textwrap.dedent(inspect.getsource(source))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        for argument, value in zip(tree.args.args, function.args, strict=True):
            self.assign(argument.arg, value)
        self.body(tree.body)
        if not self.b.block.is_terminated:
            self.b.ret(i64(0))

    def refuse(self, node: ast.AST) -> NotImplementedError:
        return NotImplementedError(f"{self.name}: not in the compiled subset of Python: {ast.unparse(node)}")

    def assign(self, name: str, value: ir.Value) -> None:
        if name not in self.variables:
            with self.b.goto_entry_block():
                self.variables[name] = self.b.alloca(i64, name=name)
        self.b.store(value, self.variables[name])

    def body(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)
            if self.b.block.is_terminated:
                return

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                pass
            case ast.Expr(value=ast.Call() as call):
                self.call(call)
            case ast.Assign(targets=[ast.Name(id=name)]):
                self.assign(name, self.value(node.value))
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=sources)):
                values = [self.value(source) for source in sources]
                for target, value in zip(targets, values, strict=True):
                    assert isinstance(target, ast.Name)
                    self.assign(target.id, value)
            case ast.AugAssign(target=ast.Name(id=name) as target):
                self.assign(name, self.value(ast.BinOp(ast.Name(target.id), node.op, node.value)))
            case ast.If():
                then, otherwise, done = (self.b.append_basic_block(n) for n in ("then", "else", "done"))
                self.b.cbranch(self.condition(node.test), then, otherwise)
                for block, statements in ((then, node.body), (otherwise, node.orelse)):
                    self.b.position_at_end(block)
                    self.body(statements)
                    if not self.b.block.is_terminated:
                        self.b.branch(done)
                self.b.position_at_end(done)
            case ast.While(orelse=[]):
                self.loop(lambda: self.condition(node.test), node.body, lambda: None)
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=bounds), orelse=[]):
                self.for_range(name, bounds, node.body)
            case ast.Break():
                self.b.branch(self.breaks[-1])
            case ast.Return():
                self.b.ret(self.value(node.value) if node.value is not None else i64(0))
            case _:
                raise self.refuse(node)

    def loop(self, test: Callable[[], ir.Value], body: list[ast.stmt], after: Callable[[], None]) -> None:
        head, step, done = (self.b.append_basic_block(n) for n in ("head", "step", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(test(), step, done)
        self.b.position_at_end(step)
        self.breaks.append(done)
        self.body(body)
        self.breaks.pop()
        if not self.b.block.is_terminated:
            after()
            self.b.branch(head)
        self.b.position_at_end(done)

    def for_range(self, name: str, bounds: list[ast.expr], body: list[ast.stmt]) -> None:
        # Python leaves the loop variable at its last value; here it is one step further, so it must not be read then.
        start = self.value(bounds[0]) if len(bounds) > 1 else i64(0)
        stop = self.value(bounds[min(1, len(bounds) - 1)])
        step = self.value(bounds[2]) if len(bounds) > 2 else i64(1)
        negative = len(bounds) > 2 and isinstance(bounds[2], ast.UnaryOp)
        self.assign(name, start)

        def advance() -> None:
            self.assign(name, self.b.add(self.b.load(self.variables[name]), step))

        self.loop(
            lambda: self.b.icmp_signed(">" if negative else "<", self.b.load(self.variables[name]), stop), body, advance
        )

    def call(self, node: ast.Call) -> ir.Value | None:
        if not isinstance(node.func, ast.Name) or node.keywords:
            raise self.refuse(node)
        values = [self.value(argument) for argument in node.args]
        name = node.func.id
        if name in self.others:
            return self.b.call(self.others[name], values)
        if name in OPERATIONS:
            return OPERATIONS[name](self.b, *values)
        raise self.refuse(node)

    def either(self, test: ast.expr, first: Callable[[], ir.Value], second: Callable[[], ir.Value]) -> ir.Value:
        """One of two values; only that one is computed."""
        blocks = [self.b.append_basic_block(n) for n in ("then", "else")]
        done = self.b.append_basic_block("done")
        self.b.cbranch(self.condition(test), *blocks)
        incoming = []
        for block, value in zip(blocks, (first, second), strict=True):
            self.b.position_at_end(block)
            incoming.append((value(), self.b.block))
            self.b.branch(done)
        self.b.position_at_end(done)
        phi = self.b.phi(i64)
        for result, block in incoming:
            phi.add_incoming(result, block)
        return phi

    def condition(self, node: ast.expr) -> ir.Value:
        return self.b.icmp_signed("!=", self.value(node), i64(0))

    def value(self, node: ast.expr) -> ir.Value:
        match node:
            case ast.Constant(value=bool() | int() as constant):
                return i64(int(constant))
            case ast.Name(id=name) if name in self.variables:
                return self.b.load(self.variables[name])
            case ast.Name(id=name) if isinstance(self.globals.get(name), int):
                return i64(self.globals[name])
            case ast.BinOp() if type(node.op) in _BINARY:
                return getattr(self.b, _BINARY[type(node.op)])(self.value(node.left), self.value(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return self.b.neg(self.value(node.operand))
            case ast.UnaryOp(op=ast.Not()):
                return self.b.zext(self.b.icmp_signed("==", self.value(node.operand), i64(0)), i64)
            case ast.Compare():
                values = [self.value(part) for part in (node.left, *node.comparators)]
                result = ir.IntType(1)(1)
                for op, left, right in zip(node.ops, values, values[1:], strict=False):
                    result = self.b.and_(result, self.b.icmp_signed(_COMPARE[type(op)], left, right))
                return self.b.zext(result, i64)
            case ast.BoolOp(values=[first, *rest]):
                second = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                if isinstance(node.op, ast.And):
                    return self.either(first, lambda: self.value(second), lambda: i64(0))
                return self.either(first, lambda: i64(1), lambda: self.value(second))
            case ast.IfExp():
                return self.either(node.test, lambda: self.value(node.body), lambda: self.value(node.orelse))
            case ast.Call():
                result = self.call(node)
                if result is not None:
                    return result
        raise self.refuse(node)


def emit(module: ir.Module, functions: Sequence[Callable[..., Any]]) -> None:
    """Add Python functions of the subset to a module, under their names; they may call each other."""
    emitted = {}
    for source in functions:
        arguments = [i64] * len(inspect.signature(source).parameters)
        emitted[source.__name__] = ir.Function(module, ir.FunctionType(i64, arguments), source.__name__)
    for source in functions:
        _Function(source, emitted[source.__name__], emitted)


def compile_module(fill: Callable[[ir.Module], None], exported: Sequence[str]) -> tuple[list[int], Any]:
    """Compile the module that `fill` fills for this processor: the exported functions' addresses, and their owner."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2, jit=True
    )
    module = ir.Module("seqmoe_kernels")
    module.triple, module.data_layout = binding.get_process_triple(), str(machine.target_data)
    fill(module)
    for function in module.functions:
        if not function.is_declaration and function.name not in exported:
            function.linkage = "internal"
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return [engine.get_function_address(name) for name in exported], engine
