//! Chooses the instruction a probe is set on.
//!
//! A uprobe replaces an instruction by a breakpoint. The kernel emulates a few instructions after it (about
//! 0.5 us a hit) and runs all others out of line in single-step mode (about 9 us). So the probe goes to the
//! first emulated instruction of the function at which the argument registers are still as the caller left
//! them.
//!
//! x86-64 (arch/x86/kernel/uprobes.c, 5.10 to 6.18): `push` of a 64-bit register with no or the 0x41 prefix,
//! one-byte `nop` with 0x66 prefixes, and `jmp`, `jcc` and `call` with a relative target are emulated by
//! every supported kernel. Longer `nop`s are emulated by the newest only, and those of 5 bytes may be
//! replaced by a call there: they are passed over. aarch64 (arch/arm64/kernel/probes/decode-insn.c): relative
//! and register branches, `adr`, `adrp` are simulated.
//!
//! Where a probe needs a function's result too, and the function does little more than a system call, the
//! conditional jump behind the system call is a site: the result is in its register, the arguments are as the
//! kernel got them, and the jump is emulated. That is cheaper than the entry of such functions, which has no
//! emulated instruction at all.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess, Register,
};

/// Instructions looked at behind the entry. A prologue is shorter, and each one passed over is one that could
/// have been reached by another way.
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
    /// Emulated conditional jump behind a system call, to tell its failure.
    Syscall,
    /// As [`SiteKind::Syscall`], behind the function of libc that makes the system calls of others: all of their
    /// calls hit it.
    Helper,
    /// A return: single-stepped on x86-64, for functions that are called a few times for a request.
    Return,
    /// Single-stepped: a hit costs some 20 times more.
    Slow,
}

impl SiteKind {
    /// All, in the order of [`SiteKind::index`].
    pub const ALL: [Self; 7] = [
        Self::Push,
        Self::Nop,
        Self::Branch,
        Self::Syscall,
        Self::Helper,
        Self::Return,
        Self::Slow,
    ];

    /// Label value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Nop => "nop",
            Self::Branch => "branch",
            Self::Syscall => "syscall",
            Self::Helper => "helper",
            Self::Return => "return",
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

/// The best site in a function with its first arguments in registers, up to four that are still as the caller
/// left them, from its first bytes (the whole of it, where known: a branch back to the site is seen only then).
/// Falls back to the entry.
#[must_use]
pub fn choose(arch: Arch, code: &[u8], arguments: u8) -> Site {
    match arch {
        Arch::X86_64 => x86_64(code, arguments),
        Arch::Aarch64 => aarch64(code, arguments),
    }
    .unwrap_or(Site::ENTRY)
}

/// The sites behind the system calls of a function: where it is told whether they failed. A function that
/// threads can be cancelled in makes its call in two places. Empty: it has none, as where another function
/// makes the call.
///
/// On x86-64 the probe finds the three first arguments of the system call in their registers, on aarch64 the
/// second and third: the result takes the place of the first.
#[must_use]
pub fn behind_syscalls(arch: Arch, code: &[u8]) -> Vec<Site> {
    match arch {
        Arch::X86_64 => x86_64_syscalls(code),
        Arch::Aarch64 => aarch64_syscalls(code),
    }
}

/// The returns of a function, from the whole of its code. Returns of a call that leaves by a jump to another function
/// are not among them. Empty: it has none, or what looks like one may be the middle of another instruction.
#[must_use]
pub fn returns(arch: Arch, code: &[u8]) -> Vec<Site> {
    match arch {
        Arch::X86_64 => x86_64_returns(code),
        Arch::Aarch64 => aarch64_returns(code),
    }
}

fn a_return(offset: u64, before: usize) -> Site {
    Site {
        offset,
        kind: SiteKind::Return,
        skipped: u8::try_from(before).unwrap_or(u8::MAX),
    }
}

/// Every byte must be part of an instruction, the last one must end the code, and no jump may lead between two: then
/// the code is read as the processor does.
fn x86_64_returns(code: &[u8]) -> Vec<Site> {
    let instructions: Vec<_> = Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
        .iter()
        .collect();
    let end = code.len() as u64;
    let is_start = |address: u64| {
        instructions
            .binary_search_by_key(&address, Instruction::ip)
            .is_ok()
    };
    let is_read_right = instructions.iter().all(|instruction| {
        let is_inside = match instruction.flow_control() {
            FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
                let target = instruction.near_branch_target();
                target >= end || is_start(target)
            }
            _ => true,
        };
        !instruction.is_invalid() && is_inside
    });
    if !is_read_right || instructions.last().map(Instruction::next_ip) != Some(end) {
        return Vec::new();
    }
    instructions
        .iter()
        .enumerate()
        .filter(|(_, instruction)| instruction.flow_control() == FlowControl::Return)
        .map(|(before, instruction)| a_return(instruction.ip(), before))
        .collect()
}

/// `ret`, `retaa`, `retab`. Instructions have one size; data among them would have to look like these.
fn aarch64_returns(code: &[u8]) -> Vec<Site> {
    if !code.len().is_multiple_of(4) {
        return Vec::new();
    }
    let is_return = |word: u32| word & 0xffff_fc1f == 0xd65f_0000 || word & 0xffff_fbff == 0xd65f_0bff;
    words(code)
        .iter()
        .enumerate()
        .filter(|(_, word)| is_return(**word))
        .map(|(before, _)| a_return(4 * before as u64, before))
        .collect()
}

/// Of the sites behind the system calls of a function that threads can be cancelled in, those that a process with
/// several threads comes to. Such a process makes the call between two calls of libc's own, which allow and forbid
/// the cancellation; a process with one thread makes it without, in another place. All of them where no site lies
/// behind a call.
#[must_use]
pub fn of_threads(arch: Arch, code: &[u8], sites: Vec<Site>) -> Vec<Site> {
    let first_call = match arch {
        Arch::X86_64 => Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
            .iter()
            .find(|instruction| instruction.code() == Code::Call_rel32_64)
            .map(|instruction| instruction.ip()),
        Arch::Aarch64 => words(code)
            .iter()
            .zip(0_u64..)
            .find(|(word, _)| **word & 0xfc00_0000 == BL)
            .map(|(_, index)| 4 * index),
    };
    let behind: Vec<Site> = sites
        .iter()
        .filter(|site| first_call.is_some_and(|call| call < site.offset))
        .copied()
        .collect();
    if behind.is_empty() { sites } else { behind }
}

const BL: u32 = 0x9400_0000;

fn behind_syscall(offset: u64, before: usize) -> Site {
    Site {
        offset,
        kind: SiteKind::Syscall,
        skipped: u8::try_from(before).unwrap_or(u8::MAX),
    }
}

/// The function that another one leaves its system call to (glibc from 2.41 on): how many bytes it lies behind the
/// entry of that one. `None`: it calls none, or several.
#[must_use]
pub fn helper(arch: Arch, code: &[u8]) -> Option<i64> {
    let mut calls = match arch {
        Arch::X86_64 => x86_64_calls(code),
        Arch::Aarch64 => aarch64_calls(code),
    };
    calls.dedup();
    match calls[..] {
        [distance] => Some(distance),
        _ => None,
    }
}

/// The site in such a helper, behind its own call, where it is told whether the system call failed: it has the
/// result, and the arguments no more.
#[must_use]
pub fn behind_helper(arch: Arch, code: &[u8]) -> Option<Site> {
    match arch {
        Arch::X86_64 => {
            let instructions: Vec<_> = Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
                .iter()
                .take(usize::from(MAX_SKIPPED))
                .collect();
            let call = instructions
                .iter()
                .position(|instruction| instruction.flow_control() == FlowControl::Call)?;
            let mut pairs = instructions.windows(2).enumerate().skip(call + 1);
            pairs.find_map(|(before, pair)| {
                let [compare, jump] = pair else { return None };
                tells_failure(code, *compare, *jump).then(|| Site {
                    kind: SiteKind::Helper,
                    ..behind_syscall(jump.ip(), before + 1)
                })
            })
        }
        Arch::Aarch64 => {
            let words = words(code);
            let words = words.get(..words.len().min(usize::from(MAX_SKIPPED)))?;
            let call = words.iter().position(|word| word & 0xfc00_0000 == BL)?;
            let mut pairs = words.windows(2).enumerate().skip(call + 1);
            pairs.find_map(|(before, pair)| match *pair {
                [CMN_4095 | CMN_4096, jump] if is_failure_branch(jump) => Some(Site {
                    kind: SiteKind::Helper,
                    ..behind_syscall(4 * u64::try_from(before + 1).ok()?, before + 1)
                }),
                _ => None,
            })
        }
    }
}

/// Where calls, and jumps out of the function, lead to.
fn x86_64_calls(code: &[u8]) -> Vec<i64> {
    Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
        .iter()
        .filter(|instruction| {
            matches!(
                instruction.code(),
                Code::Call_rel32_64 | Code::Jmp_rel32_64 | Code::Jmp_rel8_64
            )
        })
        .map(|instruction| instruction.near_branch_target().cast_signed())
        .filter(|target| !usize::try_from(*target).is_ok_and(|target| target < code.len()))
        .collect()
}

fn aarch64_calls(code: &[u8]) -> Vec<i64> {
    words(code)
        .iter()
        .zip(0_i64..)
        .filter(|(word, _)| **word & 0x7c00_0000 == 0x1400_0000)
        .map(|(word, index)| 4 * (index + signed_field(*word, 0, 26)))
        .filter(|target| !usize::try_from(*target).is_ok_and(|target| target < code.len()))
        .collect()
}

/// `syscall`, `cmp rax, -4095` (or -4096), and a conditional jump.
fn x86_64_syscalls(code: &[u8]) -> Vec<Site> {
    let instructions: Vec<_> = Decoder::with_ip(64, code, 0, DecoderOptions::NONE)
        .iter()
        .collect();
    let triples = instructions.windows(3).enumerate();
    triples
        .filter_map(|(before, triple)| {
            let [call, compare, jump] = triple else {
                return None;
            };
            let found = call.code() == Code::Syscall && tells_failure(code, *compare, *jump);
            found.then(|| behind_syscall(jump.ip(), before + 2))
        })
        .collect()
}

fn tells_failure(code: &[u8], compare: Instruction, jump: Instruction) -> bool {
    compare.code() == Code::Cmp_RAX_imm32
        && matches!(compare.immediate32to64(), -4096 | -4095)
        && jump.flow_control() == FlowControl::ConditionalBranch
        && bytes(code, &jump).and_then(emulated) == Some(SiteKind::Branch)
}

fn bytes<'a>(code: &'a [u8], instruction: &Instruction) -> Option<&'a [u8]> {
    let start = usize::try_from(instruction.ip()).ok()?;
    code.get(start..start + instruction.len())
}

const CMN_4095: u32 = 0xb13f_fc1f;
const CMN_4096: u32 = 0xb140_041f;

/// `svc #0`, `cmn x0, #4095` (or 4096), and `b.cs` or `b.hi`; the result may be kept in another register first.
fn aarch64_syscalls(code: &[u8]) -> Vec<Site> {
    const SVC: u32 = 0xd400_0001;
    let words = words(code);
    let mut sites = Vec::new();
    for (at, rest) in (0..words.len()).filter_map(|at| Some((at, words.get(at..)?))) {
        let before = match *rest {
            [SVC, CMN_4095 | CMN_4096, jump, ..] if is_failure_branch(jump) => at + 2,
            // mov xN, x0
            [SVC, keep, CMN_4095 | CMN_4096, jump, ..]
                if keep & 0xffff_ffe0 == 0xaa00_03e0 && is_failure_branch(jump) =>
            {
                at + 3
            }
            _ => continue,
        };
        sites.extend(
            u64::try_from(before)
                .ok()
                .map(|index| behind_syscall(4 * index, before)),
        );
    }
    sites
}

fn words(code: &[u8]) -> Vec<u32> {
    let (words, _) = code.as_chunks::<4>();
    words.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// `b.cs` or `b.hi`.
fn is_failure_branch(word: u32) -> bool {
    matches!(word & 0xff00_001f, 0x5400_0002 | 0x5400_0008)
}

fn x86_64(code: &[u8], arguments: u8) -> Option<Site> {
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
        if let Some(kind) = emulated(bytes(code, &instruction)?) {
            let site = Site {
                offset: instruction.ip(),
                kind,
                skipped,
            };
            return passed_once(code, site.offset).then_some(site);
        }
        // That of an `int` in place leaves it what it is.
        let is_widened = instruction.code() == Code::Movsxd_r64_rm32
            && instruction.op0_register() == instruction.op1_register().full_register();
        if instruction.code() != Code::Endbr64
            && !is_widened
            && (instruction.flow_control() != FlowControl::Next
                || writes_argument(&mut info, &instruction, arguments))
        {
            return None;
        }
    }
    None
}

/// The kernel decides by the bytes of the instruction, so this does too.
fn emulated(bytes: &[u8]) -> Option<SiteKind> {
    match bytes {
        [0x50..=0x57] | [0x41, 0x50..=0x57] => Some(SiteKind::Push),
        [prefixes @ .., 0x90] if prefixes.iter().all(|&b| b == 0x66) => Some(SiteKind::Nop),
        [0xeb | 0xe8 | 0xe9 | 0x70..=0x7f, ..] | [0x0f, 0x80..=0x8f, ..] => Some(SiteKind::Branch),
        _ => None,
    }
}

fn writes_argument(info: &mut InstructionInfoFactory, instruction: &Instruction, arguments: u8) -> bool {
    let registers = [Register::RDI, Register::RSI, Register::RDX, Register::RCX];
    let kept = registers.get(..usize::from(arguments)).unwrap_or(&registers);
    info.info(instruction).used_registers().iter().any(|used| {
        kept.contains(&used.register().full_register())
            && matches!(
                used.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            )
    })
}

/// Whether no branch of the function comes back to between its entry (excluded) and the site: then one call
/// is one hit.
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

/// Passes over hints (`nop`, `bti`, `paciasp`), stores, `mov` and `add`/`sub` of an immediate into registers
/// other than those of the arguments, and an `int` that is widened in place; takes the first simulated instruction;
/// anything else ends the search.
fn aarch64(code: &[u8], arguments: u8) -> Option<Site> {
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
        if !passed_over(word, u32::from(arguments)) {
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

fn passed_over(word: u32, arguments: u32) -> bool {
    let spared = word & 0x1f >= arguments;
    // Pre- and post-indexed stores write their base register.
    let base_is_spared = (word >> 5) & 0x1f >= arguments;
    // Hints.
    word & 0xffff_f01f == 0xd503_201f
        // stp, of all kinds of registers, in all addressing modes.
        || word & 0x3a40_0000 == 0x2800_0000 && base_is_spared
        // str, post-indexed and pre-indexed, then with an unsigned offset.
        || word & 0x3be0_0c00 == 0x3800_0400 && base_is_spared
        || word & 0x3be0_0c00 == 0x3800_0c00 && base_is_spared
        || word & 0x3bc0_0000 == 0x3900_0000
        // mov between registers.
        || word & 0x7fe0_ffe0 == 0x2a00_03e0 && spared
        // mov of a constant.
        || word & 0x7f80_0000 == 0x5280_0000 && spared
        // sxtw in place: the argument stays what it is.
        || word & 0xffff_fc00 == 0x9340_7c00 && word & 0x1f == (word >> 5) & 0x1f
        // sxtw elsewhere.
        || word & 0xffff_fc00 == 0x9340_7c00 && spared
        // add and sub of an immediate that leave the flags alone; mov to and from sp is one.
        || word & 0x3f80_0000 == 0x1100_0000 && spared
}

/// Sign-extended field of an instruction.
fn signed_field(word: u32, low: u32, bits: u32) -> i64 {
    i64::from((word >> low) << (32 - bits)) << 32 >> (64 - bits)
}

fn branches_back(code: &[u8], site: u64) -> bool {
    code.chunks_exact(4).zip(0_i64..).any(|(word, index)| {
        let Ok(bytes) = <[u8; 4]>::try_from(word) else {
            return false;
        };
        let word = u32::from_le_bytes(bytes);
        let distance = if word & 0xfc00_0000 == 0x1400_0000 {
            signed_field(word, 0, 26)
        } else if word & 0xff00_0010 == 0x5400_0000 || word & 0x7e00_0000 == 0x3400_0000 {
            signed_field(word, 5, 19)
        } else if word & 0x7e00_0000 == 0x3600_0000 {
            signed_field(word, 5, 14)
        } else {
            return false;
        };
        u64::try_from((index + distance) * 4).is_ok_and(|target| (4..=site).contains(&target))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn site(offset: u64, kind: SiteKind, skipped: u8) -> Site {
        Site {
            offset,
            kind,
            skipped,
        }
    }

    #[rstest]
    #[case::push(&[0x55], site(0, SiteKind::Push, 0))]
    #[case::push_r13(&[0x41, 0x55], site(0, SiteKind::Push, 0))]
    #[case::endbr64_push(&[0xf3, 0x0f, 0x1e, 0xfa, 0x55], site(4, SiteKind::Push, 1))]
    #[case::endbr64_push_r13(&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x55], site(4, SiteKind::Push, 1))]
    #[case::sub_rsp_call(&[0x48, 0x83, 0xec, 0x18, 0xe8, 0, 1, 0, 0], site(4, SiteKind::Branch, 1))]
    #[case::test_je(&[0x48, 0x85, 0xf6, 0x74, 0x10], site(3, SiteKind::Branch, 1))]
    #[case::test_je_near(&[0x48, 0x85, 0xf6, 0x0f, 0x84, 0, 1, 0, 0], site(3, SiteKind::Branch, 1))]
    #[case::jmp(&[0xeb, 0x10], site(0, SiteKind::Branch, 0))]
    #[case::thunk(&[0xf3, 0x0f, 0x1e, 0xfa, 0xe9, 0, 1, 0, 0], site(4, SiteKind::Branch, 1))]
    #[case::other_register_first(&[0x31, 0xc0, 0x55], site(2, SiteKind::Push, 1))]
    #[case::nop(&[0x90], site(0, SiteKind::Nop, 0))]
    #[case::nop_with_prefix(&[0x66, 0x90], site(0, SiteKind::Nop, 0))]
    #[case::long_nop_is_passed_over(&[0x0f, 0x1f, 0x44, 0, 0, 0x55], site(5, SiteKind::Push, 1))]
    #[case::pause_is_no_nop(&[0xf3, 0x90, 0x55], site(2, SiteKind::Push, 1))]
    #[case::xchg_r8_is_no_nop(&[0x49, 0x90, 0x55], site(2, SiteKind::Push, 1))]
    #[case::push_with_two_prefixes(&[0x66, 0x41, 0x55, 0x55], site(3, SiteKind::Push, 1))]
    #[case::push_of_a_constant(&[0x6a, 0x01, 0x55], site(2, SiteKind::Push, 1))]
    #[case::store_of_an_argument(&[0x48, 0x89, 0x7c, 0x24, 0xf8, 0x53], site(5, SiteKind::Push, 1))]
    // From here on the entry is all that is left.
    #[case::first_argument_written(&[0x48, 0x89, 0xf7, 0x55], Site::ENTRY)]
    #[case::half_of_the_third_written(&[0x89, 0xf2, 0x55], Site::ENTRY)]
    #[case::byte_of_the_second_written(&[0x40, 0xb6, 0x01, 0x55], Site::ENTRY)]
    #[case::written_by_division(&[0x48, 0xf7, 0xf1, 0x55], Site::ENTRY)]
    #[case::returns(&[0xc3], Site::ENTRY)]
    #[case::system_call(&[0x0f, 0x05, 0x55], Site::ENTRY)]
    #[case::indirect_jump(&[0xff, 0x25, 0, 1, 0, 0, 0x55], Site::ENTRY)]
    #[case::branch_that_the_kernel_rejects(&[0x66, 0xe9, 0, 1, 0, 0, 0x55], Site::ENTRY)]
    #[case::loop_over_the_site(&[0x31, 0xc0, 0x55, 0xeb, 0xfd], Site::ENTRY)]
    #[case::loop_to_before_the_site(&[0x31, 0xc0, 0x31, 0xc9, 0x55, 0x75, 0xfb], Site::ENTRY)]
    #[case::no_instruction(&[0x06, 0x55], Site::ENTRY)]
    #[case::cut_short(&[0xf3, 0x0f, 0x1e], Site::ENTRY)]
    #[case::empty(&[], Site::ENTRY)]
    fn x86_64(#[case] code: &[u8], #[case] expected: Site) {
        assert_eq!(choose(Arch::X86_64, code, 3), expected);
    }

    #[rstest]
    #[case::one(&[0x31, 0xc0, 0xc3], &[2])]
    #[case::several(&[0x75, 0x03, 0x31, 0xc0, 0xc3, 0x5b, 0xc3], &[4, 6])]
    #[case::with_a_prefix(&[0xf3, 0xc3], &[0])]
    #[case::that_pops_arguments(&[0xc2, 0x08, 0x00], &[0])]
    #[case::and_a_jump_to_another_function(&[0x75, 0x01, 0xc3, 0xe9, 0, 1, 0, 0], &[2])]
    #[case::padding_in_between(&[0xc3, 0x0f, 0x1f, 0x44, 0, 0, 0xc3], &[0, 6])]
    // The byte of a return inside another instruction is none.
    #[case::a_constant(&[0xb8, 0xc3, 0xc3, 0xc3, 0xc3, 0xc3], &[5])]
    #[case::none_but_a_jump(&[0xe9, 0, 1, 0, 0], &[])]
    // What follows is not read as the processor does.
    #[case::jump_between_two_instructions(&[0x75, 0x01, 0xb8, 0xc3, 0xc3, 0xc3, 0xc3, 0xc3], &[])]
    #[case::no_instruction(&[0x06, 0xc3], &[])]
    #[case::cut_short(&[0xc3, 0xb8, 0x01], &[])]
    #[case::empty(&[], &[])]
    fn x86_64_returns(#[case] code: &[u8], #[case] expected: &[u64]) {
        let offsets: Vec<u64> = returns(Arch::X86_64, code)
            .iter()
            .map(|site| site.offset)
            .collect();
        assert_eq!(offsets, expected);
    }

    #[rstest]
    #[case::one(&[0x5280_0000, 0xd65f_03c0], &[4])]
    #[case::of_another_register(&[0xd65f_0280], &[0])]
    #[case::signed(&[0xd65f_0bff, 0xd65f_0fff], &[0, 4])]
    #[case::branch_to_a_register(&[0xd61f_0000], &[])]
    fn aarch64_returns(#[case] words: &[u32], #[case] expected: &[u64]) {
        let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let offsets: Vec<u64> = returns(Arch::Aarch64, &code)
            .iter()
            .map(|site| site.offset)
            .collect();
        assert_eq!(offsets, expected);
        assert!(returns(Arch::Aarch64, &code[1..]).is_empty());
    }

    /// A jump to the entry is a call with other arguments, and is to be seen as one.
    #[test]
    fn a_jump_to_the_entry_is_a_call() {
        assert_eq!(
            choose(Arch::X86_64, &[0x31, 0xc0, 0x55, 0xeb, 0xfb], 3),
            site(2, SiteKind::Push, 1)
        );
    }

    #[test]
    fn the_search_ends() {
        let mut code = [0x31, 0xc0].repeat(17);
        code.push(0x55);
        assert_eq!(choose(Arch::X86_64, &code, 3), Site::ENTRY);
    }

    const NOP: u32 = 0xd503_201f;
    const BTI_C: u32 = 0xd503_245f;
    const PACIASP: u32 = 0xd503_233f;
    const STP_FP_LR: u32 = 0xa9be_7bfd; // stp x29, x30, [sp, #-32]!
    const MOV_FP_SP: u32 = 0x9100_03fd; // mov x29, sp
    const STP_19_20: u32 = 0xa901_53f3; // stp x19, x20, [sp, #16]
    const SUB_SP: u32 = 0xd100_83ff; // sub sp, sp, #32
    const MOV_19_0: u32 = 0xaa00_03f3; // mov x19, x0
    const STR_0: u32 = 0xf900_07e0; // str x0, [sp, #8]
    const CBZ_1: u32 = 0xb400_0101; // cbz x1, +32
    const RET: u32 = 0xd65f_03c0;

    #[rstest]
    #[case::checks_an_argument(&[CBZ_1], site(0, SiteKind::Branch, 0))]
    #[case::hints(&[BTI_C, PACIASP, NOP, CBZ_1], site(12, SiteKind::Branch, 3))]
    #[case::frame(&[STP_FP_LR, MOV_FP_SP, STP_19_20, MOV_19_0, 0x9400_0004], site(16, SiteKind::Branch, 4))] // bl
    #[case::adrp(&[SUB_SP, 0x9000_0003], site(4, SiteKind::Branch, 1))] // adrp x3
    #[case::adrp_of_an_argument(&[0x9000_0000], site(0, SiteKind::Branch, 0))] // adrp x0
    #[case::tail_call(&[0x1400_0004], site(0, SiteKind::Branch, 0))] // b
    #[case::test_bit(&[STR_0, 0x3600_0042], site(4, SiteKind::Branch, 1))] // tbz w2, #0
    #[case::condition(&[0x5400_0040], site(0, SiteKind::Branch, 0))] // b.eq
    #[case::returns(&[RET], site(0, SiteKind::Branch, 0))]
    #[case::argument_written(&[0xaa01_03e0, CBZ_1], Site::ENTRY)] // mov x0, x1
    #[case::argument_added_to(&[0x9100_0421, CBZ_1], Site::ENTRY)] // add x1, x1, #1
    #[case::argument_loaded(&[0xf940_0020, CBZ_1], Site::ENTRY)] // ldr x0, [x1]
    #[case::base_written(&[0xa8c1_7c44, CBZ_1], Site::ENTRY)] // ldp x4, xzr, [x2], #16
    #[case::store_moves_its_base(&[0xf800_8443, CBZ_1], Site::ENTRY)] // str x3, [x2], #8
    #[case::loop_over_the_site(&[NOP, CBZ_1, 0x17ff_ffff], Site::ENTRY)] // b -4
    #[case::empty(&[], Site::ENTRY)]
    fn aarch64(#[case] words: &[u32], #[case] expected: Site) {
        let code: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(choose(Arch::Aarch64, &code, 3), expected);
    }

    // Functions of real C libraries, from their entry.

    /// `ftruncate` and `flock` of glibc 2.36 (Debian 12), and as distributions with CET and glibc 2.31 to 2.41
    /// build them.
    #[rstest]
    #[case::ftruncate(b"\xb8\x4d\0\0\0\x0f\x05\x48\x3d\0\xf0\xff\xff\x77\x01\xc3\x48\x8b\x15\x79\x2d\x0d\0", &[13])]
    #[case::flock(b"\xb8\x49\0\0\0\x0f\x05\x48\x3d\x01\xf0\xff\xff\x73\x01\xc3\x48\x8b\x0d\x39\xa5\x0d\0", &[13])]
    #[case::with_cet(b"\xf3\x0f\x1e\xfa\xb8\x49\0\0\0\x0f\x05\x48\x3d\x01\xf0\xff\xff\x73\x01\xc3", &[17])]
    #[case::near_jump(b"\xb8\x4d\0\0\0\x0f\x05\x48\x3d\0\xf0\xff\xff\x0f\x87\0\x01\0\0\xc3", &[13])]
    // read: with one thread, and with several.
    #[case::cancellable(
        b"\x80\x3d\x31\x33\x0e\0\0\x74\x17\x31\xc0\x0f\x05\x48\x3d\0\xf0\xff\xff\x77\x5b\xc3\
        \x66\x2e\x0f\x1f\x84\0\0\0\0\0\x48\x83\xec\x28\x48\x89\x54\x24\x18\x48\x89\x74\x24\x10\
        \x89\x7c\x24\x08\xe8\x49\xd5\xf8\xff\x48\x8b\x54\x24\x18\x48\x8b\x74\x24\x10\x41\x89\xc0\
        \x8b\x7c\x24\x08\x31\xc0\x0f\x05\x48\x3d\0\xf0\xff\xff\x77\x34\x44\x89\xc7",
        &[19, 82]
    )]
    // The helper that newer ones make cancellable calls in, and musl's way.
    #[case::helper(b"\x41\x8b\x03\x0f\x05\xc3", &[])]
    #[case::musl(b"\xb8\x49\0\0\0\x0f\x05\x48\x89\xc7\xe9\0\x01\0\0", &[])]
    #[case::other_limit(b"\x0f\x05\x48\x3d\x02\xf0\xff\xff\x73\x01\xc3", &[])]
    #[case::no_jump(b"\x0f\x05\x48\x3d\x01\xf0\xff\xff\xc3", &[])]
    #[case::in_a_constant(b"\x48\xb8\x0f\x05\x48\x3d\x01\xf0\xff\xff\x73\x01\xc3", &[])]
    fn x86_64_system_calls(#[case] code: &[u8], #[case] offsets: &[u64]) {
        let sites = behind_syscalls(Arch::X86_64, code);
        assert!(sites.iter().all(|site| site.kind == SiteKind::Syscall));
        assert_eq!(sites.iter().map(|site| site.offset).collect::<Vec<_>>(), offsets);
    }

    const SVC: u32 = 0xd400_0001;

    /// `ftruncate` and `flock` of glibc 2.36 (Debian 12).
    #[rstest]
    #[case::ftruncate(&[0x9340_7c00, 0xd280_05c8, SVC, 0xb140_041f, 0x5400_0048, RET], &[16])]
    #[case::flock(&[NOP, 0xd280_0408, SVC, 0xb13f_fc1f, 0x5400_0042, RET], &[16])]
    #[case::with_bti(&[BTI_C, 0xd280_0408, SVC, 0xb13f_fc1f, 0x5400_0042, RET], &[16])]
    // read keeps the result first.
    #[case::cancellable(&[SVC, 0xaa00_03f3, 0xb140_041f, 0x5400_0328], &[12])]
    #[case::another_is_kept(&[SVC, 0xaa01_03f3, 0xb140_041f, 0x5400_0328], &[])]
    #[case::helper(&[SVC, RET], &[])]
    #[case::other_condition(&[SVC, 0xb13f_fc1f, 0x5400_0043, RET], &[])]
    fn aarch64_system_calls(#[case] words: &[u32], #[case] offsets: &[u64]) {
        let code: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let sites = behind_syscalls(Arch::Aarch64, &code);
        assert!(sites.iter().all(|site| site.kind == SiteKind::Syscall));
        assert_eq!(sites.iter().map(|site| site.offset).collect::<Vec<_>>(), offsets);
    }

    /// `read` and `close` of glibc 2.41 (Debian 13), and the function that makes their system calls.
    #[test]
    fn x86_64_helper() {
        const READ: &[u8] = b"\x48\x83\xec\x10\x48\x63\xff\x45\x31\xc9\x45\x31\xc0\x6a\x00\x31\xc9\
            \xe8\xda\xb5\xf8\xff\x48\x83\xc4\x18\xc3";
        const CLOSE: &[u8] = b"\x48\x83\xec\x10\x48\x63\xff\x45\x31\xc9\x45\x31\xc0\x6a\x03\x31\xc9\
            \x31\xd2\x31\xf6\xe8\x06\xfd\xf8\xff\x48\x83\xc4\x18\xc3";
        const HELPER: &[u8] = b"\x48\x83\xec\x10\xff\x74\x24\x18\xe8\x73\xff\xff\xff\x5a\x59\
            \x48\x3d\x00\xf0\xff\xff\x77\x09\x48\x83\xc4\x08\xc3";
        assert!(behind_syscalls(Arch::X86_64, READ).is_empty());
        assert_eq!(choose(Arch::X86_64, READ, 3), site(17, SiteKind::Branch, 6));
        assert_eq!(helper(Arch::X86_64, READ), Some(22 - 0x7_4a26));
        assert_eq!(choose(Arch::X86_64, CLOSE, 1), site(21, SiteKind::Branch, 8));
        assert_eq!(choose(Arch::X86_64, CLOSE, 3), Site::ENTRY);
        assert_eq!(
            behind_helper(Arch::X86_64, HELPER),
            Some(site(21, SiteKind::Helper, 6))
        );
    }

    /// The same on the other machine.
    #[test]
    fn aarch64_helper() {
        let code = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
        let read = code(&[
            0xd503_245f,
            0x9340_7c00,
            0xd280_07e6,
            0xd280_0005,
            0xd280_0004,
            0xd280_0003,
            0x17fe_7a6d,
        ]);
        let close = code(&[
            0xd503_233f,
            0xa9bf_7bfd,
            0xd280_0726,
            0xd280_0005,
            0x9100_03fd,
            0xd280_0004,
            0xd280_0003,
            0xd280_0002,
            0xd280_0001,
            0x9340_7c00,
            0x97fe_8ce9,
            0xa8c1_7bfd,
            0xd503_23bf,
            RET,
        ]);
        let shared = code(&[
            0xd503_233f,
            0xa9bf_7bfd,
            0x9100_03fd,
            0x97ff_ffda,
            0xb140_041f,
            0x5400_0088,
            RET,
        ]);
        assert_eq!(choose(Arch::Aarch64, &read, 3), site(24, SiteKind::Branch, 6));
        assert_eq!(helper(Arch::Aarch64, &read), Some(0x828cc - 0xe_3f00));
        assert_eq!(choose(Arch::Aarch64, &close, 1), site(40, SiteKind::Branch, 10));
        assert_eq!(choose(Arch::Aarch64, &close, 3), Site::ENTRY);
        assert_eq!(helper(Arch::Aarch64, &close), Some(0x828cc - 0xd_f500));
        assert_eq!(
            behind_helper(Arch::Aarch64, &shared),
            Some(site(20, SiteKind::Helper, 5))
        );
    }

    #[rstest]
    #[case::no_call(b"\x31\xc0\xc3", None)]
    #[case::two(b"\xe8\x00\x01\x00\x00\xe8\x00\x02\x00\x00\xc3", None)]
    #[case::the_same_twice(b"\xe8\x00\x01\x00\x00\xe8\xfb\x00\x00\x00\xc3", Some(0x105))]
    #[case::jump(b"\xe9\x00\x01\x00\x00", Some(0x105))]
    #[case::jump_inside(b"\xeb\x00\xe8\x00\x01\x00\x00\xc3", Some(0x107))]
    fn one_helper(#[case] code: &[u8], #[case] distance: Option<i64>) {
        assert_eq!(helper(Arch::X86_64, code), distance);
    }

    /// `SSL_read_ex` of OpenSSL 3.0 (Debian 12).
    #[test]
    fn returns_and_arguments_of_ssl_read_ex() {
        const CODE: &[u8] =
            b"\x48\x83\xec\x08\xe8\xc7\xfd\xff\xff\x31\xd2\x85\xc0\x0f\x48\xc2\x48\x83\xc4\x08\
            \x31\xd2\x31\xc9\x31\xf6\x31\xff\xc3";
        assert_eq!(choose(Arch::X86_64, CODE, 4), site(4, SiteKind::Branch, 1));
        assert_eq!(returns(Arch::X86_64, CODE), [site(28, SiteKind::Return, 10)]);
        assert_eq!(choose(Arch::X86_64, &CODE[22..], 4), Site::ENTRY);
    }

    /// `read` of glibc 2.36 (Debian 12): the first site is that of processes with one thread.
    #[test]
    fn sites_of_threads() {
        const READ: &[u8] = b"\x80\x3d\x31\x33\x0e\x00\x00\x74\x17\x31\xc0\x0f\x05\x48\x3d\x00\xf0\xff\xff\
            \x77\x5b\xc3\x66\x2e\x0f\x1f\x84\x00\x00\x00\x00\x00\x48\x83\xec\x28\x48\x89\x54\x24\x18\
            \x48\x89\x74\x24\x10\x89\x7c\x24\x08\xe8\x49\xd5\xf8\xff\x48\x8b\x54\x24\x18\
            \x48\x8b\x74\x24\x10\x41\x89\xc0\x8b\x7c\x24\x08\x31\xc0\x0f\x05\x48\x3d\x00\xf0\xff\xff\
            \x77\x34\x44\x89\xc7";
        let all = behind_syscalls(Arch::X86_64, READ);
        assert_eq!(all.iter().map(|site| site.offset).collect::<Vec<_>>(), [19, 82]);
        let kept = of_threads(Arch::X86_64, READ, all);
        assert_eq!(kept.iter().map(|site| site.offset).collect::<Vec<_>>(), [82]);
        // One that nobody can be cancelled in.
        let all = behind_syscalls(Arch::X86_64, &READ[9..]);
        assert_eq!(of_threads(Arch::X86_64, &READ[9..32], all.clone()), all);
    }

    /// `shm_open` and `shm_unlink` of glibc 2.36 (Debian 12), and with CET.
    #[rstest]
    #[case::shm_open(
        b"\x41\x54\x41\x89\xf4\x48\x89\xfe\x55\x89\xd5\x31\xd2\x53",
        3,
        site(0, SiteKind::Push, 0)
    )]
    #[case::shm_open_with_cet(b"\xf3\x0f\x1e\xfa\x41\x54\x41\x89\xf4", 3, site(4, SiteKind::Push, 1))]
    #[case::shm_unlink(
        b"\x53\x48\x89\xfe\x31\xd2\x48\x81\xec\x20\x01\0\0",
        1,
        site(0, SiteKind::Push, 0)
    )]
    #[case::one_argument_kept(b"\x48\x89\xfe\x31\xd2\x53", 1, site(5, SiteKind::Push, 2))]
    #[case::two_arguments_not(b"\x48\x89\xfe\x31\xd2\x53", 2, Site::ENTRY)]
    #[case::the_first_is_not_kept(b"\x48\x89\xf7\x53", 1, Site::ENTRY)]
    fn x86_64_arguments(#[case] code: &[u8], #[case] arguments: u8, #[case] expected: Site) {
        assert_eq!(choose(Arch::X86_64, code, arguments), expected);
    }

    /// `shm_open` and `shm_unlink` of glibc 2.36 (Debian 12).
    #[rstest]
    #[case::shm_open(&[0xa9ab_7bfd, 0xf000_08a3, 0xf947_3463], 3, site(4, SiteKind::Branch, 1))]
    #[case::shm_unlink(&[0xa9ac_7bfd, 0xaa00_03e1, 0xf000_08a2, 0xf947_3442], 1, site(8, SiteKind::Branch, 2))]
    #[case::shm_unlink_of_three(&[0xa9ac_7bfd, 0xaa00_03e1, 0xf000_08a2, 0xf947_3442], 3, Site::ENTRY)]
    fn aarch64_arguments(#[case] words: &[u32], #[case] arguments: u8, #[case] expected: Site) {
        let code: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(choose(Arch::Aarch64, &code, arguments), expected);
    }

    proptest! {
        #[test]
        fn any_code(code in proptest::collection::vec(any::<u8>(), 0..200)) {
            for arch in [Arch::X86_64, Arch::Aarch64] {
                let site = choose(arch, &code, 3);
                prop_assert!(site == Site::ENTRY || site.offset < code.len() as u64);
                prop_assert!(arch == Arch::X86_64 || site.offset.is_multiple_of(4));
                let behind = behind_syscalls(arch, &code);
                for site in behind.iter().chain(&behind_helper(arch, &code)) {
                    prop_assert!(site.offset < code.len() as u64);
                }
                prop_assert_eq!(of_threads(arch, &code, behind.clone()).is_empty(), behind.is_empty());
                let _ = helper(arch, &code);
            }
        }
    }
}
