"""PTX of the products of codes on a GPU: text only, so that tests run it without one.

Operands are numbered as Triton does: outputs, then inputs. Lane (g, t) of a warp holds codes of
rows g and g + 8 of A and the column g of B.
"""


def _int4() -> str:
    """32 codes of two rows ($2 to $5, $6 to $9) by the digits of x in even and odd columns
    ($10 to $17 in turn) -> $0, $1: 256 times the sum of the first digit plus that of the second.
    """
    lines = []
    for i in range(4):                             # a word: 8 codes, first in the lowest bits
        row, other, c = f"${2 + i}", f"${6 + i}", "{c0,c1,c2,c3}" if i else "{z,z,z,z}"
        lines.append(f"""
            and.b32 a0, {row}, 0x0f0f0f0f; shr.u32 a2, {row}, 4; and.b32 a2, a2, 0x0f0f0f0f;
            and.b32 a1, {other}, 0x0f0f0f0f; shr.u32 a3, {other}, 4; and.b32 a3, a3, 0x0f0f0f0f;
            mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {{c0,c1,c2,c3}}, {{a0,a1,a2,a3}},
                {{${10 + 2 * i},${11 + 2 * i}}}, {c};""")
    return "{.reg .b32 z, a<4>, c<4>; mov.b32 z, 0;" + "".join(lines) + """
        mad.lo.s32 c0, c0, 256, c1; mad.lo.s32 c2, c2, 256, c3;
        cvt.rn.f32.s32 $0, c0; cvt.rn.f32.s32 $1, c2;}"""


INT4 = _int4()
INT4_REGISTERS = "=f,=f" + ",r" * 16

# 16 codes of two rows ($4 to $7, $8 to $11) by a digit of x ($12 to $15), added to $16 to $19:
# the sums of rows g, g, g + 8, g + 8 in columns 2 t, 2 t + 1, 2 t, 2 t + 1
INT8 = """{.reg .b32 c<4>;
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {c0,c1,c2,c3}, {$4,$8,$5,$9}, {$12,$13},
        {$16,$17,$18,$19};
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$6,$10,$7,$11}, {$14,$15},
        {c0,c1,c2,c3};}"""
INT8_REGISTERS = "=r,=r,=r,=r" + ",r" * 16


def _int4_weights() -> str:
    """16 bits of each of two neighbouring fours of columns ($4), their scale ($5) and zero ($6) in
    bfloat16 -> $0 to $3: (code - 8) scale + zero of the first to the fourth column of both, rounded
    once. 0x4300 is 128, whose lowest bits count ones: no conversion.
    """
    lines = []
    for i in range(4):
        shifted = "mov.b32 a, $4;" if i == 0 else f"shr.u32 a, $4, {4 * i};"
        lines.append(f"""
            {shifted} lop3.b32 a, a, 0x000f000f, o, 0xea;
            fma.rn.bf16x2 a, a, i, b; fma.rn.bf16x2 ${i}, a, $5, $6;""")
    constants = "mov.b32 o, 0x43004300; mov.b32 i, 0x3f803f80; mov.b32 b, 0xc308c308;"
    return "".join(["{.reg .b32 a, o, i, b; ", constants, *lines, "}"])


INT4_WEIGHTS = _int4_weights()
INT4_WEIGHTS_REGISTERS = "=&r,=&r,=&r,=&r,r,r,r"

# two neighbouring pairs of codes ($2) -> $0, $1: the first and the second of both in bfloat16, as
# 128 + its lowest seven bits - (128 + its sign's 128)
INT8_WEIGHTS = """{.reg .b32 a, b, h, m, o;
    mov.b32 o, 0x43004300; mov.b32 m, 0xbf80bf80; shr.u32 h, $2, 8;
    lop3.b32 a, $2, 0x007f007f, o, 0xea; lop3.b32 b, $2, 0x00800080, o, 0xea;
    fma.rn.bf16x2 $0, b, m, a;
    lop3.b32 a, h, 0x007f007f, o, 0xea; lop3.b32 b, h, 0x00800080, o, 0xea;
    fma.rn.bf16x2 $1, b, m, a;}"""
INT8_WEIGHTS_REGISTERS = "=&r,=&r,r"
