//! No program in the committed objects uses 64 bytes of stack or more, with its calls.
//!
//! From 6.13 on, the kernel gives a probe program of that size a private stack for each CPU, which two probes
//! that preempt each other then share. It counts a function's stack in steps of 16 bytes, so 49 bytes are
//! 64 already (`round_up_stack_depth` and `BPF_PRIV_STACK_MIN_SIZE` in kernel/bpf/verifier.c and
//! include/linux/bpf.h).
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "what the test cannot read fails it"
)]
use std::collections::HashMap;

use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SymbolKind};
use rstest::rstest;

const LIMIT: u32 = 64;

/// One instruction; the second half of a 16-byte one counts as an instruction of its own, with opcode 0.
#[derive(Clone, Copy, Debug)]
struct Insn {
    opcode: u8,
    dst: usize,
    src: usize,
    offset: i16,
    imm: i32,
}

const R10: usize = 10;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

fn decode(code: &[u8]) -> Vec<Insn> {
    code.chunks_exact(8)
        .map(|b| Insn {
            opcode: b[0],
            dst: usize::from(b[1] & 0x0f),
            src: usize::from(b[1] >> 4),
            offset: i16::from_le_bytes([b[2], b[3]]),
            imm: i32::from_le_bytes([b[4], b[5], b[6], b[7]]),
        })
        .collect()
}

/// A function: its instructions and the functions that it calls.
#[derive(Debug, Default)]
struct Function {
    insns: Vec<Insn>,
    calls: Vec<String>,
}

/// How far below r10 each register points, where it may hold a pointer into the stack.
type Registers = [Option<i64>; 11];

/// The deepest byte below r10 that a function touches or hands out a pointer to.
///
/// Follows copies of r10 along every path, so that a register's later life as a number does not count.
/// What it cannot follow, it refuses.
fn own_stack(insns: &[Insn]) -> u32 {
    let mut depth = 0;
    let mut before: Vec<Option<Registers>> = vec![None; insns.len()];
    let mut start: Registers = [None; 11];
    start[R10] = Some(0);
    let mut open = vec![(0, start)];
    while let Some((at, registers)) = open.pop() {
        let Some(known) = before.get_mut(at) else { continue };
        let merged = known.map_or(registers, |known| {
            // Of two paths that meet, the deeper pointer counts (None is the least).
            std::array::from_fn(|i| known[i].max(registers[i]))
        });
        if *known == Some(merged) {
            continue;
        }
        *known = Some(merged);
        let after = step(insns[at], merged, &mut depth);
        assert!(depth <= 4096, "a pointer into the stack moves in a loop");
        open.extend(successors(insns, at).into_iter().map(|next| (next, after)));
    }
    u32::try_from(depth).expect("a depth is positive")
}

/// One instruction's effect.
fn step(insn: Insn, mut registers: Registers, depth: &mut i64) -> Registers {
    const MOV64_REG: u8 = 0xbf;
    const ADD64_IMM: u8 = 0x07;
    let (dst, src) = (insn.dst, insn.src);
    let (through, class) = match insn.opcode & 0x07 {
        1 => (registers[src], 1),
        2 => (registers[dst], 2),
        3 => (registers[dst], 3),
        class => (None, class),
    };
    if let Some(at) = through {
        *depth = (*depth).max(at - i64::from(insn.offset));
    }
    match class {
        // Stores.
        2 => {}
        3 => assert!(
            registers[src].is_none(),
            "a pointer into the stack is stored: {insn:?}"
        ),
        // Jumps and calls.
        5 | 6 => {
            if insn.opcode == CALL {
                registers[..=5].fill(None);
            }
        }
        7 if insn.opcode == MOV64_REG && insn.offset == 0 => registers[dst] = registers[src],
        7 if insn.opcode == ADD64_IMM => {
            if let Some(at) = &mut registers[dst] {
                *at -= i64::from(insn.imm);
                *depth = (*depth).max(*at);
            }
        }
        // Loads and all other arithmetic make dst a value that is no known pointer.
        _ => {
            assert!(
                class != 7 || registers[dst].is_none() || insn.opcode & 0xf0 == 0xb0,
                "arithmetic on a pointer into the stack: {insn:?}"
            );
            registers[dst] = None;
        }
    }
    registers
}

/// The instructions that may run after one.
fn successors(insns: &[Insn], at: usize) -> Vec<usize> {
    let insn = insns[at];
    let jump = |by: i64| usize::try_from(i64::try_from(at).expect("small") + 1 + by).expect("inside");
    match insn.opcode {
        EXIT => vec![],
        // A 64-bit constant takes two.
        0x18 => vec![at + 2],
        CALL => vec![at + 1],
        0x05 => vec![jump(i64::from(insn.offset))],
        0x06 => vec![jump(i64::from(insn.imm))],
        opcode if matches!(opcode & 0x07, 5 | 6) => vec![at + 1, jump(i64::from(insn.offset))],
        _ => vec![at + 1],
    }
}

/// Stack of a function and of the deepest chain of calls below it, as the kernel counts it.
fn stack(functions: &HashMap<String, Function>, name: &str) -> u32 {
    let function = functions
        .get(name)
        .unwrap_or_else(|| panic!("no function {name}"));
    let below = function
        .calls
        .iter()
        .map(|callee| stack(functions, callee))
        .max()
        .unwrap_or(0);
    own_stack(&function.insns).next_multiple_of(16) + below
}

/// Names of the programs of an object, and all its functions.
fn functions(bytes: &[u8]) -> (Vec<String>, HashMap<String, Function>) {
    let file = object::File::parse(bytes).expect("an ELF object");
    let mut programs = Vec::new();
    let mut out = HashMap::new();
    let symbols: Vec<_> = file
        .symbols()
        .filter(|s| s.kind() == SymbolKind::Text && s.size() > 0)
        .collect();
    for symbol in &symbols {
        let index = symbol.section_index().expect("a function lies in a section");
        let section = file.section_by_index(index).expect("the section is there");
        let name = symbol.name().expect("a name").to_owned();
        let data = section.data().expect("code");
        let at = usize::try_from(symbol.address()).expect("small");
        let len = usize::try_from(symbol.size()).expect("small");
        let insns = decode(&data[at..at + len]);
        if section.name() != Ok(".text") {
            programs.push(name.clone());
        }
        let mut calls = Vec::new();
        for (i, insn) in insns.iter().enumerate() {
            // `call` of a function: src 1. Within a section, imm is relative; else a relocation names it.
            if insn.opcode != CALL || insn.src != 1 {
                continue;
            }
            let place = symbol.address() + 8 * i as u64;
            let relocated = section.relocations().find(|(offset, _)| *offset == place);
            let (section_of_callee, address) = match relocated.map(|(_, r)| r.target()) {
                Some(RelocationTarget::Symbol(callee)) => {
                    let callee = file.symbol_by_index(callee).expect("the symbol is there");
                    let base = callee.section_index();
                    let inside = if callee.kind() == SymbolKind::Section {
                        8 * (i64::from(insn.imm) + 1)
                    } else {
                        i64::try_from(callee.address()).expect("small")
                    };
                    (base, inside)
                }
                Some(other) => panic!("{name}: a call relocated to {other:?}"),
                None => (
                    Some(index),
                    i64::try_from(place).expect("small") + 8 * (i64::from(insn.imm) + 1),
                ),
            };
            let callee = symbols
                .iter()
                .find(|s| s.section_index() == section_of_callee && i64::try_from(s.address()) == Ok(address))
                .unwrap_or_else(|| panic!("{name}: a call of nothing known"));
            calls.push(callee.name().expect("a name").to_owned());
        }
        out.insert(name, Function { insns, calls });
    }
    (programs, out)
}

#[rstest]
#[case::x86_64(include_bytes!("../prebuilt/omnitap-x86_64.bpf.o"))]
#[case::aarch64(include_bytes!("../prebuilt/omnitap-aarch64.bpf.o"))]
fn programs_stay_under_the_limit(#[case] object: &[u8]) {
    let (mut programs, functions) = functions(object);
    programs.sort();
    assert_eq!(
        programs,
        [
            "flock",
            "ftruncate",
            "http_accept",
            "http_close",
            "http_note_accept",
            "http_note_read",
            "http_note_sendmsg",
            "http_note_tls_read",
            "http_note_write",
            "http_note_writev",
            "http_read",
            "http_return",
            "http_sendmsg",
            "http_syscall",
            "http_syscall_entry",
            "http_tls_free",
            "http_tls_read",
            "http_tls_write",
            "http_write",
            "http_writev",
            "process_exec",
            "process_exit",
            "process_fork",
            "shm_open",
            "shm_unlink",
            "store_get",
            "store_put",
            "store_return",
            "yuanrong_get",
            "yuanrong_return",
            "yuanrong_set",
            "zmq_msg_send"
        ]
    );
    for program in programs {
        let stack = stack(&functions, &program);
        println!("{program}: {stack} bytes of stack");
        assert!(stack < LIMIT, "{program} uses {stack} bytes of stack");
    }
}

fn store(offset: i16) -> [u8; 8] {
    let [a, b] = offset.to_le_bytes();
    // *(u64 *)(r10 + offset) = r1
    [0x7b, 0x1a, a, b, 0, 0, 0, 0]
}

fn pointer(offset: i32) -> Vec<u8> {
    let [a, b, c, d] = offset.to_le_bytes();
    // r2 = r10; r2 += offset
    vec![0xbf, 0xa2, 0, 0, 0, 0, 0, 0, 0x07, 2, 0, 0, a, b, c, d]
}

#[rstest]
#[case::nothing(vec![], 0)]
#[case::stores_of_48(store(-48).to_vec(), 48)]
#[case::stores_of_49_count_as_64(store(-49).to_vec(), 64)]
#[case::stores_of_64(store(-64).to_vec(), 64)]
#[case::a_pointer_to_40(pointer(-40), 48)]
#[case::a_pointer_to_64(pointer(-64), 64)]
#[case::a_pointer_to_512(pointer(-512), 512)]
#[case::a_number_is_no_pointer(vec![0x07, 3, 0, 0, 0xc0, 0xff, 0xff, 0xff], 0)]
#[case::through_a_pointer([pointer(-40), vec![0x7b, 0x12, 0xe8, 0xff, 0, 0, 0, 0]].concat(), 64)]
#[case::behind_a_jump([[0x15, 1, 1, 0, 0, 0, 0, 0], store(-8), store(-72)].concat(), 80)]
fn the_checker_counts(#[case] code: Vec<u8>, #[case] expected: u32) {
    let function = Function {
        insns: decode(&code),
        calls: Vec::new(),
    };
    let functions = HashMap::from([("f".to_owned(), function)]);
    assert_eq!(stack(&functions, "f"), expected);
}

#[test]
#[should_panic(expected = "arithmetic on a pointer into the stack")]
fn the_checker_refuses_what_it_cannot_follow() {
    // r2 = r10; r2 += r3
    own_stack(&decode(&[
        0xbf, 0xa2, 0, 0, 0, 0, 0, 0, 0x0f, 0x32, 0, 0, 0, 0, 0, 0,
    ]));
}

#[test]
fn the_checker_adds_up_calls() {
    let caller = Function {
        insns: decode(&store(-24)),
        calls: vec!["callee".to_owned(), "leaf".to_owned()],
    };
    let below = Function {
        insns: decode(&pointer(-32)),
        calls: Vec::new(),
    };
    let functions = HashMap::from([
        ("caller".to_owned(), caller),
        ("callee".to_owned(), below),
        ("leaf".to_owned(), Function::default()),
    ]);
    assert_eq!(stack(&functions, "caller"), 64);
}
