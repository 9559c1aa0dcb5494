"""The decode machine's instruction set: one row of `WIDTH` int64 per instruction, the single source of every field's place.

A tensor operand is `address, dtype, strides[4]` (strides in elements, outermost dimension first) from its base column;
sizes are shared. A scalar operand has dtype `IMMEDIATE` and its float64 bits in the address column. Buffers never move
after the program is written, so addresses are absolute.
"""

WIDTH = 48

# Columns
OP, FN, INTEGER, SOURCE_SLOT = 0, 1, 2, 3  # SOURCE_SLOT: 1 + index into the run-time array that holds in0's address
SIZES = 4  # 4 sizes, outermost first, padded with 1 in front
OUT, IN0, IN1, IN2 = 8, 14, 20, 26  # each: address, dtype, 4 strides
IMM0, IMM1 = 32, 33  # float64 bits
AUX = 34  # up to 14 more fields, by operation

# Element types
F32, BF16, I64, U8, I32 = 0, 1, 2, 3, 4  # bool is U8
IMMEDIATE = 9

# Operations
(OP_EW, OP_EW_INT, OP_REDUCE, OP_SOFTMAX, OP_TOPK, OP_LINEAR, OP_MATMUL, OP_ROWS, OP_GATHER, OP_CONV, OP_APPEND,
 OP_ATTEND, OP_CUMSUM, OP_NORM, OP_LATENT) = range(1, 16)  # fmt: skip

# Functions of OP_EW, on one, two or three inputs
(E_COPY, E_NEG, E_RSQRT, E_SQRT, E_EXP, E_LOG, E_SIGMOID, E_SILU, E_GELU, E_GELU_TANH, E_TANH, E_RELU, E_COS, E_SIN, E_ABS,
 E_RECIPROCAL, E_SQUARE, E_SOFTPLUS, E_CLAMP, E_NOT, E_FLOOR, E_LOG1P) = range(22)  # fmt: skip
(E_ADD, E_SUB, E_MUL, E_DIV, E_POW, E_MAX, E_MIN, E_EQ, E_NE, E_LT, E_LE, E_GT, E_GE, E_AND, E_OR, E_FLOORDIV,
 E_REMAINDER, E_XOR) = range(32, 50)  # fmt: skip
E_WHERE, E_ADDCMUL = 64, 65

# Functions of OP_REDUCE
R_SUM, R_MEAN, R_MAX, R_MIN, R_PROD, R_ANY, R_ALL, R_ARGMAX = range(8)

# The run array: what changes from step to step, and where things are. RUN_PADDING + i: left padding of sequence i; after
# those, addresses of experts' results.
(RUN_POSITION, RUN_SCRATCH, RUN_PARALLEL, RUN_TABLE, RUN_THREADS, RUN_ROOM, RUN_ROOM_BYTES, RUN_JOB) = range(8)
RUN_PADDING = 8
