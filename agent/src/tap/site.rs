//! Chooses the instruction a probe is set on.
//!
//! A uprobe replaces an instruction by a breakpoint. The kernel emulates a few instructions after it (about 0.5 us a
//! hit) and runs all others out of line in single-step mode (about 9 us). So the probe goes to the first emulated
//! instruction of the function at which the argument registers are still as the caller left them.
//!
//! x86-64 (arch/x86/kernel/uprobes.c, 5.10 to 6.18): `push` of a 64-bit register with no or the 0x41 prefix, one-byte
//! `nop` with 0x66 prefixes, and `jmp`, `jcc` and `call` with a relative target are emulated by every supported kernel.
//! Longer `nop`s are emulated by the newest only, and those of 5 bytes may be replaced by a call there: they are passed
//! over. aarch64 (arch/arm64/kernel/probes/decode-insn.c): relative and register branches, `adr`, `adrp` are simulated.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess, Register,
};

/// Instructions looked at behind the entry. A prologue is shorter, and each one passed over is one that could have been
/// reached by another way.
const MAX_SKIPPED: u8 = 16;

/// Instruction set of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// x86-64.
    X86_64,
    /// 64-bit ARM, little endian.
    Aarch64,
}

impl Arch {
    /// The one that this agent was built for.
    #[cfg(target_arch = "x86_64")]
    pub const NATIVE: Self = Self::X86_64;
    /// The one that this agent was built for.
    #[cfg(target_arch = "aarch64")]
    pub const NATIVE: Self = Self::Aarch64;
}

/// What a probe site costs, by the instruction there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SiteKind {
    /// Emulated `push` of a register.
    Push,
    /// Emulated one-byte `nop`.
    Nop,
    /// Emulated branch or address computation.
    Branch,
    /// Single-stepped: a hit costs some 20 times more.
    Slow,
}

impl SiteKind {
    /// All, in the order of [`SiteKind::index`].
    pub const ALL: [Self; 4] = [Self::Push, Self::Nop, Self::Branch, Self::Slow];

    /// Label value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Nop => "nop",
            Self::Branch => "branch",
            Self::Slow => "slow",
        }
    }

    /// Place in [`SiteKind::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Where a probe goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// Bytes from the function's entry.
    pub offset: u64,
    /// What a hit costs.
    pub kind: SiteKind,
    /// Instructions between the entry and the site.
    pub skipped: u8,
}

impl Site {
    const ENTRY: Self = Self {
        offset: 0,
        kind: SiteKind::Slow,
        skipped: 0,
    };
}

/// The best site in a function that takes three arguments in registers, from its first bytes (the whole of it, where
/// known: a branch back to the site is seen only then). Falls back to the entry.
#[must_use]
pub fn choose(arch: Arch, code: &[u8]) -> Site {
    match arch {
        Arch::X86_64 => x86_64(code),
        Arch::Aarch64 => aarch64(code),
    }
    .unwrap_or(Site::ENTRY)
}

fn x86_64(code: &[u8]) -> Option<Site> {
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let mut info = InstructionInfoFactory::new();
    let mut instruction = Instruction::default();
    for skipped in 0..=MAX_SKIPPED {
        if !decoder.can_decode() {
            return None;
        }
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return None;
        }
        let start = usize::try_from(instruction.ip()).ok()?;
        let bytes = code.get(start..start + instruction.len())?;
        if let Some(kind) = emulated(&instruction, bytes) {
            let site = Site {
                offset: instruction.ip(),
                kind,
                skipped,
            };
            return passed_once(code, site.offset).then_some(site);
        }
        if instruction.code() != Code::Endbr64
            && (instruction.flow_control() != FlowControl::Next || writes_argument(&mut info, &instruction))
        {
            return None;
        }
    }
    None
}

/// The kernel decides by the bytes, so this does too.
fn emulated(instruction: &Instruction, bytes: &[u8]) -> Option<SiteKind> {
    match bytes {
        [0x50..=0x57] | [0x41, 0x50..=0x57] => Some(SiteKind::Push),
        [prefixes @ .., 0x90] if prefixes.iter().all(|&b| b == 0x66) => Some(SiteKind::Nop),
        [0xeb | 0xe8 | 0xe9 | 0x70..=0x7f, ..] | [0x0f, 0x80..=0x8f, ..]
            if instruction.near_branch_target() != 0 || instruction.is_jcc_short_or_near() =>
        {
            Some(SiteKind::Branch)
        }
        _ => None,
    }
}

fn writes_argument(info: &mut InstructionInfoFactory, instruction: &Instruction) -> bool {
    info.info(instruction).used_registers().iter().any(|used| {
        matches!(
            used.register().full_register(),
            Register::RDI | Register::RSI | Register::RDX
        ) && matches!(
            used.access(),
            OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
        )
    })
}

/// Whether no branch of the function comes back to between its entry (excluded) and the site: then one call is one hit.
fn passed_once(code: &[u8], site: u64) -> bool {
    if site == 0 {
        return true;
    }
    Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
        .iter()
        .all(|instruction| match instruction.flow_control() {
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                !(1..=site).contains(&instruction.near_branch_target())
            }
            _ => true,
        })
}

/// Passes over hints (`nop`, `bti`, `paciasp`), stores, `mov` and `add`/`sub` of an immediate into registers other than
/// x0 to x2; takes the first simulated instruction; anything else ends the search.
fn aarch64(code: &[u8]) -> Option<Site> {
    let mut words = code.chunks_exact(4).zip(0_u64..);
    for skipped in 0..=MAX_SKIPPED {
        let (word, index) = words.next()?;
        let word = u32::from_le_bytes(word.try_into().ok()?);
        let offset = index * 4;
        if simulated(word) {
            let once = skipped == 0 || !branches_back(code, offset);
            return once.then_some(Site {
                offset,
                kind: SiteKind::Branch,
                skipped,
            });
        }
        if !passed_over(word) {
            return None;
        }
    }
    None
}

fn simulated(word: u32) -> bool {
    word & 0x7c00_0000 == 0x1400_0000 // b, bl
        || word & 0xff00_0010 == 0x5400_0000 // b.cond
        || word & 0x7e00_0000 == 0x3400_0000 // cbz, cbnz
        || word & 0x7e00_0000 == 0x3600_0000 // tbz, tbnz
        || word & 0x1f00_0000 == 0x1000_0000 // adr, adrp
        || word & 0xff9f_fc1f == 0xd61f_0000 && word & 0x0060_0000 != 0x0060_0000 // br, blr, ret
}

fn passed_over(word: u32) -> bool {
    let spared = word & 0x1f > 2;
    word & 0xffff_f01f == 0xd503_201f // hints
        || word & 0x3a40_0000 == 0x2800_0000 // stp, all kinds of registers and addressing
            && base_is_spared(word)
        || word & 0x3b20_0c00 == 0x3800_0400 && base_is_spared(word) && word & 0x00c0_0000 == 0 // str, post-indexed
        || word & 0x3b20_0c00 == 0x3800_0c00 && base_is_spared(word) && word & 0x00c0_0000 == 0 // str, pre-indexed
        || word & 0x3bc0_0000 == 0x3900_0000 // str, unsigned offset
        || word & 0x7fe0_ffe0 == 0x2a00_03e0 && spared // mov xd, xm
        || word & 0x3f80_0000 == 0x1100_0000 && spared // add, sub of an immediate, flags untouched (mov to and from sp too)
}

/// Pre- and post-indexed stores write their base register.
fn base_is_spared(word: u32) -> bool {
    (word >> 5) & 0x1f > 2
}

fn branches_back(code: &[u8], site: u64) -> bool {
    code.chunks_exact(4).zip(0_i64..).any(|(word, index)| {
        let Ok(bytes) = <[u8; 4]>::try_from(word) else {
            return false;
        };
        let word = u32::from_le_bytes(bytes);
        let field = |low: u32, bits: u32| -> i64 {
            // Sign-extended field of the instruction.
            i64::from((word >> low) << (32 - bits)) << 32 >> (64 - bits)
        };
        let distance = if word & 0xfc00_0000 == 0x1400_0000 {
            field(0, 26)
        } else if word & 0xff00_0010 == 0x5400_0000 || word & 0x7e00_0000 == 0x3400_0000 {
            field(5, 19)
        } else if word & 0x7e00_0000 == 0x3600_0000 {
            field(5, 14)
        } else {
            return false;
        };
        u64::try_from((index + distance) * 4).is_ok_and(|target| (4..=site).contains(&target))
    })
}
