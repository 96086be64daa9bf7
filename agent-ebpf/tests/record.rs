//! Records as the programs write them, taken apart.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
use omnitap_ebpf::{
    FrameHeader, HttpHeader, HttpOp, Kind, ProcessRecord, Record, RecordError, ShmHeader, ShmStep, flag,
};
use rstest::rstest;

fn frame(head: &[u8], tail: &[u8], room: usize) -> (FrameHeader, Vec<u8>) {
    let header = FrameHeader {
        kind: Kind::Frame as u32,
        flags: flag::MORE,
        time_ns: 0x0102_0304_0506_0708,
        tgid: 100,
        tid: 101,
        socket: 0x7f00_0000_1000,
        content: 0x7f00_0000_2000,
        size: 1_000_000,
        head_len: u32::try_from(head.len()).unwrap(),
        tail_len: u32::try_from(tail.len()).unwrap(),
    };
    let mut bytes = Vec::new();
    bytes.extend(header.kind.to_ne_bytes());
    bytes.extend(header.flags.to_ne_bytes());
    bytes.extend(header.time_ns.to_ne_bytes());
    bytes.extend(header.tgid.to_ne_bytes());
    bytes.extend(header.tid.to_ne_bytes());
    bytes.extend(header.socket.to_ne_bytes());
    bytes.extend(header.content.to_ne_bytes());
    bytes.extend(header.size.to_ne_bytes());
    bytes.extend(header.head_len.to_ne_bytes());
    bytes.extend(header.tail_len.to_ne_bytes());
    bytes.extend(head);
    bytes.extend(tail);
    bytes.extend(vec![0xee; room]);
    (header, bytes)
}

#[rstest]
#[case::header_only(b"", b"", 0)]
#[case::exact(b"abcd", b"", 0)]
#[case::room_behind(b"abcd", b"", 60)]
#[case::head_and_tail(b"abcd", b"yz", 58)]
fn frames(#[case] head: &[u8], #[case] tail: &[u8], #[case] room: usize) {
    let (header, bytes) = frame(head, tail, room);
    assert_eq!(Record::parse(&bytes), Ok(Record::Frame { header, head, tail }));
}

#[rstest]
#[case::exec(Kind::Exec)]
#[case::fork(Kind::Fork)]
#[case::exit(Kind::Exit)]
fn processes(#[case] kind: Kind) {
    let mut bytes = Vec::new();
    bytes.extend((kind as u32).to_ne_bytes());
    bytes.extend(7_u32.to_ne_bytes());
    bytes.extend(9_u64.to_ne_bytes());
    let record = ProcessRecord {
        kind: kind as u32,
        tgid: 7,
        time_ns: 9,
    };
    assert_eq!(Record::parse(&bytes), Ok(Record::Process(kind, record)));
}

#[test]
fn each_cut_is_refused() {
    let (_, bytes) = frame(b"abcd", b"yz", 0);
    for len in 0..bytes.len() {
        let cut = Record::parse(&bytes[..len]);
        assert!(matches!(cut, Err(RecordError::Short { .. })), "{len}: {cut:?}");
    }
}

#[test]
fn an_unknown_kind_is_refused() {
    assert_eq!(
        Record::parse(&99_u32.to_ne_bytes()),
        Err(RecordError::UnknownKind(99))
    );
}

#[test]
fn lengths_near_the_limit_do_not_overflow() {
    let (_, mut bytes) = frame(b"", b"", 0);
    bytes[48..56].fill(0xff);
    assert!(matches!(Record::parse(&bytes), Err(RecordError::Short { .. })));
}

fn shm(step: u32, name: &[u8]) -> (ShmHeader, Vec<u8>) {
    let header = ShmHeader {
        kind: Kind::Shm as u32,
        step,
        time_ns: 0x0102_0304_0506_0708,
        tgid: 100,
        tid: 101,
        start_ns: 0x0102_0304_0506_0000,
        size: 1 << 33,
        name_len: u32::try_from(name.len()).unwrap(),
        reserved: 0,
    };
    let mut bytes = Vec::new();
    bytes.extend(header.kind.to_ne_bytes());
    bytes.extend(header.step.to_ne_bytes());
    bytes.extend(header.time_ns.to_ne_bytes());
    bytes.extend(header.tgid.to_ne_bytes());
    bytes.extend(header.tid.to_ne_bytes());
    bytes.extend(header.start_ns.to_ne_bytes());
    bytes.extend(header.size.to_ne_bytes());
    bytes.extend(header.name_len.to_ne_bytes());
    bytes.extend(header.reserved.to_ne_bytes());
    bytes.extend(name);
    (header, bytes)
}

#[rstest]
#[case::create(ShmStep::Create, b"/req_0_0")]
#[case::take(ShmStep::Take, b"/req_0_0")]
#[case::unlink(ShmStep::Unlink, b"/req_0_0")]
#[case::done(ShmStep::Done, b"")]
fn steps_with_shared_memory(#[case] step: ShmStep, #[case] name: &[u8]) {
    let (header, mut bytes) = shm(step as u32, name);
    for len in 0..bytes.len() {
        let cut = Record::parse(&bytes[..len]);
        assert!(matches!(cut, Err(RecordError::Short { .. })), "{len}: {cut:?}");
    }
    bytes.extend([0xee; 60]);
    assert_eq!(Record::parse(&bytes), Ok(Record::Shm { step, header, name }));
}

#[test]
fn an_unknown_step_is_refused() {
    let (_, bytes) = shm(9, b"/a");
    assert_eq!(Record::parse(&bytes), Err(RecordError::UnknownStep(9)));
}

fn http(op: u32, head: &[u8], tail: &[u8]) -> (HttpHeader, Vec<u8>) {
    let header = HttpHeader {
        kind: Kind::Http as u32,
        op,
        time_ns: 0x0102_0304_0506_0708,
        tgid: 100,
        tid: 101,
        size: 1 << 33,
        fd: -7,
        head_len: u32::try_from(head.len()).unwrap(),
        tail_len: u32::try_from(tail.len()).unwrap(),
        reserved: 0,
    };
    let mut bytes = Vec::new();
    bytes.extend(header.kind.to_ne_bytes());
    bytes.extend(header.op.to_ne_bytes());
    bytes.extend(header.time_ns.to_ne_bytes());
    bytes.extend(header.tgid.to_ne_bytes());
    bytes.extend(header.tid.to_ne_bytes());
    bytes.extend(header.size.to_ne_bytes());
    bytes.extend(header.fd.to_ne_bytes());
    bytes.extend(header.head_len.to_ne_bytes());
    bytes.extend(header.tail_len.to_ne_bytes());
    bytes.extend(header.reserved.to_ne_bytes());
    bytes.extend(head);
    bytes.extend(tail);
    (header, bytes)
}

#[rstest]
#[case::accepted(HttpOp::Accepted, b"", b"")]
#[case::received(HttpOp::Received, b"GET / HTTP/1.1", b"")]
#[case::sent(HttpOp::Sent, b"HTTP/1.1 200 OK", b"0\r\n\r\n")]
#[case::failed(HttpOp::Failed, b"", b"")]
#[case::closed(HttpOp::Closed, b"", b"")]
#[case::foreign(HttpOp::Foreign, b"", b"")]
fn what_is_done_with_connections(#[case] op: HttpOp, #[case] head: &[u8], #[case] tail: &[u8]) {
    let (header, mut bytes) = http(op as u32, head, tail);
    for len in 0..bytes.len() {
        let cut = Record::parse(&bytes[..len]);
        assert!(matches!(cut, Err(RecordError::Short { .. })), "{len}: {cut:?}");
    }
    bytes.extend([0xee; 60]);
    let expected = Record::Http {
        op,
        header,
        head,
        tail,
    };
    assert_eq!(Record::parse(&bytes), Ok(expected));
}

#[test]
fn an_unknown_operation_is_refused() {
    let (_, bytes) = http(7, b"", b"");
    assert_eq!(Record::parse(&bytes), Err(RecordError::UnknownOp(7)));
}
