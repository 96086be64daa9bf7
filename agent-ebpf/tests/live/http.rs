//! The programs of HTTP connections, against a process that reads and writes through real libc.

use std::{
    io::{Read as _, Write as _},
    net::Shutdown,
};

use omnitap_ebpf::{
    Counter, HTTP_CLASSES, HTTP_RECEIVED_HEAD, HTTP_RECEIVED_TAIL, HTTP_SENT_HEAD, HTTP_SENT_TAIL, HttpOp,
    watch,
};
use rstest::rstest;

use super::{
    DEFAULT,
    common::{self, Http, Server, Tap, Way, content},
};

const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n";

/// A process under the tap, and the tap.
fn start(args: &[&str], way: Way) -> Option<(Server, Tap)> {
    if !common::can_run() {
        return None;
    }
    if way == Way::AtOnce && cfg!(not(target_arch = "x86_64")) {
        eprintln!("SKIPPED: on this machine result and arguments are never in the registers together");
        return None;
    }
    let server = Server::start(args);
    let mut tap = Tap::load(4 << 20, DEFAULT);
    tap.watch(server.pid(), watch::HTTP);
    tap.attach_http(server.pid(), way);
    Some((server, tap))
}

/// As an order's answer.
fn size_of_order(size: usize) -> i64 {
    i64::try_from(size).unwrap()
}

/// Operations and sizes, in their order.
fn told(tap: &mut Tap) -> Vec<(HttpOp, i32, u64)> {
    tap.drain();
    let losses: Vec<_> = tap.counters().into_iter().filter(|(c, _)| c.is_loss()).collect();
    assert_eq!(losses, []);
    tap.https
        .iter()
        .map(|http| (http.op, http.header.fd, http.header.size))
        .collect()
}

fn last(tap: &mut Tap) -> Http {
    tap.drain();
    tap.https.last().unwrap().clone()
}

#[rstest]
#[case::libuv(&["threaded"], "read", "write", "sysclose")]
#[case::asyncio(&["threaded"], "recv", "send", "close")]
#[case::single_threaded(&[], "read", "send", "close")]
fn a_request(
    #[case] args: &[&str],
    #[case] read: &str,
    #[case] write: &str,
    #[case] close: &str,
    #[values(Way::AtOnce, Way::InTurn)] way: Way,
) {
    let Some((mut server, mut tap)) = start(args, way) else {
        return;
    };
    let pid = server.pid();
    let before = super::monotonic();
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    assert_eq!(
        server.order(&format!("{read} {fd} 256000")),
        size_of_order(REQUEST.len())
    );
    assert_eq!(server.order(&format!("{write} {fd} 3 100")), 100);
    assert_eq!(server.order(&format!("{close} {fd}")), 0);
    let after = super::monotonic();
    assert_eq!(
        told(&mut tap),
        [
            (HttpOp::Accepted, fd, 0),
            (HttpOp::Received, fd, REQUEST.len() as u64),
            (HttpOp::Sent, fd, 100),
            (HttpOp::Closed, fd, 0)
        ]
    );
    assert_eq!(
        (&tap.https[1].head[..], &tap.https[1].tail[..]),
        (REQUEST, &b""[..])
    );
    assert_eq!(
        (&tap.https[2].head, &tap.https[2].tail[..]),
        (&content(3, 0..100), &b""[..])
    );
    let mut earlier = before;
    for http in &tap.https {
        assert_eq!((http.header.tgid, http.header.tid), (pid, pid));
        assert!((earlier..after).contains(&http.header.time_ns), "{http:?}");
        earlier = http.header.time_ns;
    }
    server.finish();
}

#[rstest]
fn what_is_captured_of_each_size(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    let received = HTTP_RECEIVED_HEAD + HTTP_RECEIVED_TAIL;
    let sent = HTTP_SENT_HEAD + HTTP_SENT_TAIL;
    let mut sizes = vec![1, 2, 7, 8, 9, received + 1, sent + 1, 3000, 10_000];
    for class in HTTP_CLASSES.into_iter().chain([received, sent]) {
        sizes.extend([class - 1, class, class + 1]);
    }
    for (seed, size) in sizes.into_iter().enumerate() {
        client.write_all(&content(seed, 0..size)).unwrap();
        assert_eq!(server.order(&format!("recv {fd} {size}")), size_of_order(size));
        check(
            &last(&mut tap),
            seed,
            size,
            HTTP_RECEIVED_HEAD,
            HTTP_RECEIVED_TAIL,
        );
        assert_eq!(
            server.order(&format!("write {fd} {seed} {size}")),
            size_of_order(size)
        );
        check(&last(&mut tap), seed, size, HTTP_SENT_HEAD, HTTP_SENT_TAIL);
        let mut out = vec![0; size];
        client.read_exact(&mut out).unwrap();
        assert_eq!(out, content(seed, 0..size));
    }
    told(&mut tap);
    server.finish();
}

/// All of it where head and tail together hold it, else both.
fn check(http: &Http, seed: usize, size: usize, head: usize, tail: usize) {
    let (head, tail) = if size <= head + tail {
        (size, 0)
    } else {
        (head, tail)
    };
    assert_eq!(http.header.size, size as u64);
    assert!(http.head == content(seed, 0..head), "head of {size}: {http:?}");
    assert!(
        http.tail == content(seed, size - tail..size),
        "tail of {size}: {http:?}"
    );
}

#[rstest]
fn vectors(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    // Their sizes, and how much of the first bytes is captured.
    const CASES: [(&[usize], usize); 8] = [
        (&[100], 100),
        (&[5000], HTTP_SENT_HEAD),
        // A header and its body.
        (&[150, 800], 950),
        (&[150, 9000], 150 + HTTP_SENT_TAIL),
        (&[0, 300], 300),
        (&[3000, 300], HTTP_SENT_HEAD),
        (&[HTTP_SENT_HEAD, 300], HTTP_SENT_HEAD + 300),
        (&[200, 200, 200, 200], 400),
    ];
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    for (sizes, head) in CASES {
        for call in ["writev", "sendmsg"] {
            let size: usize = sizes.iter().sum();
            let words: Vec<_> = sizes.iter().map(ToString::to_string).collect();
            let out = server.order(&format!("{call} {fd} 5 {}", words.join(" ")));
            assert_eq!(out, size_of_order(size));
            let http = last(&mut tap);
            assert_eq!((http.op, http.header.size), (HttpOp::Sent, size as u64));
            assert!(http.head == content(5, 0..head), "{call} {sizes:?}: {http:?}");
            let is_one_large = sizes.len() == 1 && size > HTTP_SENT_HEAD + HTTP_SENT_TAIL;
            let tail = if is_one_large { HTTP_SENT_TAIL } else { 0 };
            assert!(
                http.tail == content(5, size - tail..size),
                "{call} {sizes:?}: {http:?}"
            );
            client.read_exact(&mut vec![0; size]).unwrap();
        }
    }
    told(&mut tap);
    server.finish();
}

#[rstest]
fn a_slow_reader_and_vectors_that_go_out_in_part(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    let mut all = server.order(&format!("fill {fd}"));
    // That would wait, and is no event.
    assert_eq!(
        server.order(&format!("write {fd} 0 10")),
        -i64::from(libc::EAGAIN)
    );
    let mut out = vec![0; 1 << 20];
    for _ in 0..20 {
        client.read_exact(&mut out[..200_000]).unwrap();
        all -= 200_000;
        let order = format!("writev {fd} 1 70000 70000 3000000");
        let sent = server.order(&order);
        assert!(sent > 0 || sent == -i64::from(libc::EAGAIN), "{sent}");
        all += sent.max(0);
    }
    assert_eq!(server.order(&format!("close {fd}")), 0);
    let left = std::io::copy(&mut client, &mut std::io::sink()).unwrap();
    assert_eq!(i64::try_from(left).unwrap(), all);
    let told = told(&mut tap);
    let sum: u64 = told
        .iter()
        .filter(|(op, ..)| *op == HttpOp::Sent)
        .map(|(.., size)| size)
        .sum();
    assert_eq!(sum, left + 20 * 200_000);
    server.finish();
}

#[rstest]
fn clients_that_end_and_break(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(server.order(&format!("read {fd} 256000")), 0);
    assert_eq!(server.order(&format!("write {fd} 0 50")), 50);
    // With something unread in its buffer, its end is a reset.
    drop(client);
    let error = (0..100).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        let out = server.order(&format!("write {fd} 0 50"));
        (out < 0).then_some(out)
    });
    let error = error.expect("the connection is broken");
    let told = told(&mut tap);
    let received = REQUEST.len() as u64;
    assert_eq!(
        told[..4],
        [
            (HttpOp::Accepted, fd, 0),
            (HttpOp::Received, fd, received),
            (HttpOp::Received, fd, 0),
            (HttpOp::Sent, fd, 50)
        ]
    );
    assert_eq!(told.last(), Some(&(HttpOp::Failed, fd, error.unsigned_abs())));
    server.finish();
}

#[rstest]
fn descriptors_are_used_again(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let mut expected = Vec::new();
    let mut last_fd = None;
    for round in 0..20 {
        let (mut client, fd) = server.connect();
        assert_eq!(*last_fd.get_or_insert(fd), fd);
        expected.push((HttpOp::Accepted, fd, 0));
        for _ in 0..3 {
            client.write_all(REQUEST).unwrap();
            server.order(&format!("read {fd} 256000"));
            server.order(&format!("write {fd} 0 30"));
            expected.extend([
                (HttpOp::Received, fd, REQUEST.len() as u64),
                (HttpOp::Sent, fd, 30),
            ]);
        }
        server.order(&format!("{} {fd}", ["close", "sysclose"][round % 2]));
        expected.push((HttpOp::Closed, fd, 0));
        // The number is that of something else for a while.
        let pipe = server.order("pipe no connection");
        assert_eq!(pipe, i64::from(fd));
        server.order(&format!("read {fd} 100"));
        server.order(&format!("close {fd}"));
    }
    assert_eq!(told(&mut tap), expected);
    server.finish();
}

/// A connection that is older than the tap.
#[rstest]
fn adopted_with_a_request(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    if !common::can_run() || way == Way::AtOnce && cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let mut server = Server::start(&["threaded"]);
    let (mut client, fd) = server.connect();
    let mut tap = Tap::load(4 << 20, DEFAULT);
    tap.watch(server.pid(), watch::HTTP);
    tap.attach_http(server.pid(), way);
    // In the midst of something.
    client
        .write_all(b"rest of a body, or GET / of something")
        .unwrap();
    server.order(&format!("read {fd} 256000"));
    server.order(&format!("write {fd} 0 30"));
    assert_eq!(told(&mut tap), []);
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    server.order(&format!("write {fd} 0 30"));
    assert_eq!(
        told(&mut tap),
        [
            (HttpOp::Received, fd, REQUEST.len() as u64),
            (HttpOp::Sent, fd, 30)
        ]
    );
    server.finish();
}

#[test]
fn requests_by_their_begin() {
    const CASES: [(&[u8], bool); 12] = [
        (b"GET / HTTP/1.1--", true),
        (b"POST /v1/audio/speech HTTP/1.1-", true),
        (b"PUT /a HTTP/1.1--", true),
        (b"HEAD /health HTTP/1.1-", true),
        (b"PATCH /a HTTP/1.1--", true),
        (b"DELETE /a HTTP/1.1--", true),
        (b"OPTIONS * HTTP/1.1--", true),
        (b"PRI * HTTP/2.0--SM--", true),
        (b"GET /", false),
        (b"GETTING / HTTP/1.1--", false),
        (b"get / HTTP/1.1--", false),
        (b"HTTP/1.1 200 OK--", false),
    ];
    let Some((mut server, mut tap)) = start(&[], Way::here()) else {
        return;
    };
    for (begin, adopted) in CASES {
        let text = String::from_utf8_lossy(begin);
        let fd = server.order(&format!("pipe {text}"));
        server.order(&format!("read {fd} 256000"));
        assert_eq!(!told(&mut tap).is_empty(), adopted, "{text}");
        server.order(&format!("close {fd}"));
        tap.drain();
        tap.https.clear();
    }
    server.finish();
}

/// Sockets of libzmq are accepted by the same call, TLS is read by the same.
#[rstest]
fn connections_of_other_protocols_are_left(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    let (mut tls, first) = server.connect();
    tls.write_all(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03")
        .unwrap();
    let (_zmq, second) = server.connect();
    for _ in 0..3 {
        server.order(&format!("write {second} 0 64"));
    }
    assert_eq!(server.order(&format!("read {first} 256000")), 11);
    tls.write_all(REQUEST).unwrap();
    // Only a request makes it one.
    server.order(&format!("write {first} 0 64"));
    let begin = u64::from_le_bytes(*b"\x16\x03\x01\x02\0\x01\0\x01");
    assert_eq!(
        told(&mut tap),
        [
            (HttpOp::Accepted, first, 0),
            (HttpOp::Accepted, second, 0),
            (HttpOp::Foreign, second, 0),
            (HttpOp::Foreign, first, begin)
        ]
    );
    server.finish();
}

#[rstest]
fn other_descriptors_give_no_record(#[values(Way::AtOnce, Way::InTurn)] way: Way) {
    let Some((mut server, mut tap)) = start(&["threaded"], way) else {
        return;
    };
    server.order("events 1000");
    assert_eq!(told(&mut tap), []);
    let counters = tap.counters();
    let ignored = tap.counter(Counter::HttpIgnored);
    assert!(ignored >= 2000, "{counters:?}");
    assert_eq!(tap.counter(Counter::HttpCaptured), 0);
    server.finish();
}

#[test]
fn a_full_ring_is_counted_event_by_event() {
    if !common::can_run() {
        return;
    }
    let mut server = Server::start(&["threaded"]);
    let mut tap = Tap::load(64 << 10, DEFAULT);
    tap.watch(server.pid(), watch::HTTP);
    tap.attach_http(server.pid(), Way::here());
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    for _ in 0..100 {
        server.order(&format!("write {fd} 0 2000"));
        client.read_exact(&mut [0; 2000]).unwrap();
    }
    tap.drain();
    let (captured, lost) = (
        tap.counter(Counter::HttpCaptured),
        tap.counter(Counter::LostHttpRingFull),
    );
    assert_eq!(captured, tap.https.len() as u64);
    assert!(lost > 0);
    assert_eq!(captured + lost, 102);
    server.finish();
}

#[test]
fn a_process_that_is_not_watched_gives_no_event() {
    let Some((mut server, mut tap)) = start(&["threaded"], Way::here()) else {
        return;
    };
    tap.watch(server.pid(), watch::FRAMES | watch::LIFE | watch::SHM);
    let (mut client, fd) = server.connect();
    client.write_all(REQUEST).unwrap();
    server.order(&format!("read {fd} 256000"));
    server.order(&format!("write {fd} 0 30"));
    server.order(&format!("close {fd}"));
    assert_eq!(told(&mut tap), []);
    let counters = tap.counters();
    assert!(
        matches!(counters[..], [(Counter::HttpIgnored, 4..)]),
        "{counters:?}"
    );
    server.finish();
}
