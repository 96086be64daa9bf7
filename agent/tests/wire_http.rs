//! Connections of real servers give the exchanges that passed on them, however their bytes fall into calls; lost and
//! hostile bytes are counted, and nothing of them stays.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
};

use omnitap::{
    record::{Entry, HttpWhat, Item, OwnedBytes, OwnedHttp},
    wire::http::{
        HttpEvent,
        connections::{Connections, Counts, News, Outcome, Unsupported},
        note::{AudioChunk, End, ExchangeId, Note},
    },
};
use proptest::{prelude::*, sample::Index, test_runner::Config};
use rstest::rstest;
use serde::Deserialize;

/// A line of `tests/frames/exchanges.jsonl`.
#[derive(Clone, Debug, Deserialize)]
struct Case {
    name: String,
    entries: Vec<Entry>,
}

/// A recorded call and its time.
type Call = (u64, OwnedHttp);

fn cases() -> BTreeMap<String, Vec<Call>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames/exchanges.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .map(|Case { name, entries }| (name, entries.into_iter().map(call).collect()))
        .collect()
}

fn call(entry: Entry) -> Call {
    match entry.item {
        Item::Http(http) => (entry.t, http),
        item => panic!("no call: {item:?}"),
    }
}

fn case(name: &str) -> Vec<Call> {
    cases().remove(name).unwrap_or_else(|| panic!("no case {name}"))
}

/// What calls tell, and the totals.
fn news_of(calls: &[Call]) -> (Vec<News>, Counts) {
    let mut connections = Connections::new();
    let mut news = Vec::new();
    for (time_ns, call) in calls {
        connections.event(&call.event(*time_ns), &mut news);
    }
    assert_eq!(
        (connections.len(), connections.exchanges()),
        (0, 0),
        "all is over"
    );
    (news, connections.counts())
}

/// News and totals as text: a line each, times in ms.
fn told(calls: &[Call]) -> String {
    let (news, counts) = news_of(calls);
    let mut text = String::new();
    for News {
        exchange,
        time_ns,
        note,
        ..
    } in news
    {
        writeln!(text, "{:>4} #{} {note:?}", time_ns / 1_000_000, exchange.0).unwrap();
    }
    for (outcome, count) in Outcome::ALL.iter().zip(counts.requests) {
        if count > 0 {
            writeln!(text, "requests {} {count}", outcome.as_str()).unwrap();
        }
    }
    for (what, count) in Unsupported::ALL.iter().zip(counts.unsupported) {
        if count > 0 {
            writeln!(text, "unsupported {} {count}", what.as_str()).unwrap();
        }
    }
    if counts.breaks > 0 {
        writeln!(text, "breaks {}", counts.breaks).unwrap();
    }
    text
}

#[rstest]
#[case::health_three_times("health_three_times")]
#[case::health_pipelined("health_pipelined")]
#[case::not_found("not_found")]
#[case::speech_pcm("speech_pcm")]
#[case::speech_pcm_at_8000("speech_pcm_at_8000")]
#[case::speech_wav("speech_wav")]
#[case::speech_events("speech_events")]
#[case::speech_events_wav("speech_events_wav")]
#[case::speech_events_failed("speech_events_failed")]
#[case::speech_whole("speech_whole")]
#[case::speech_cut_by_the_server("speech_cut_by_the_server")]
#[case::speech_client_left("speech_client_left")]
#[case::speech_client_left_gently("speech_client_left_gently")]
#[case::speech_refused("speech_refused")]
#[case::socket_two_utterances("socket_two_utterances")]
#[case::socket_failed("socket_failed")]
#[case::socket_client_left("socket_client_left")]
#[case::socket_whole_file("socket_whole_file")]
#[case::socket_compressed("socket_compressed")]
#[case::chat_audio("chat_audio")]
#[case::chat_image("chat_image")]
#[case::image("image")]
#[case::image_small("image_small")]
#[case::image_with_stage_metrics("image_with_stage_metrics")]
#[case::image_failed("image_failed")]
#[case::image_refused("image_refused")]
#[case::image_edit("image_edit")]
#[case::image_file("image_file")]
fn a_connection_of_a_real_server(#[case] name: &str) {
    insta::assert_snapshot!(name, told(&case(name)));
}

#[test]
fn no_case_is_left_out() {
    let source = include_str!("wire_http.rs");
    for name in cases().keys() {
        assert!(source.contains(&format!("(\"{name}\")")), "{name} has no test");
    }
}

// ---- redaction ----

/// The calls without their content, as a recording has them.
fn redacted(calls: &[Call]) -> Vec<Call> {
    let mut connections = Connections::new();
    let mut news = Vec::new();
    let mut out = Vec::new();
    for (time_ns, call) in calls {
        let event = call.event(*time_ns);
        let mut blanked = call.clone();
        if let HttpWhat::Received(bytes) | HttpWhat::Sent(bytes) = &mut blanked.what {
            connections.redact(&event, &mut bytes.head, &mut bytes.tail);
        }
        out.push((*time_ns, blanked));
        connections.event(&event, &mut news);
    }
    out
}

#[rstest]
fn a_recording_without_content_tells_the_same() {
    for (name, calls) in cases() {
        let blanked = redacted(&calls);
        // Of a compressed text nothing can be left in.
        if name != "socket_compressed" {
            assert_eq!(told(&blanked), told(&calls), "{name}");
        }
        for (_, call) in &blanked {
            let (HttpWhat::Received(bytes) | HttpWhat::Sent(bytes)) = &call.what else {
                continue;
            };
            for word in [
                "[2400",
                "[0, 2",
                "broken",
                "512x256\",\"n",
                "prompt",
                "sentence_text",
                "no image",
                "Model mismatch",
                "uvicorn",
                "127.0.0.1",
                "assistant",
            ] {
                for part in [&bytes.head, &bytes.tail] {
                    let is_there = part.windows(word.len()).any(|window| window == word.as_bytes());
                    assert!(!is_there, "{name}: {word} in {}", String::from_utf8_lossy(part));
                }
            }
        }
    }
}

// ---- any way of falling into calls ----

/// The bytes of a call with something for those that are not known: `A`, which is base64 and 16-bit samples alike.
fn filled(bytes: &OwnedBytes) -> Vec<u8> {
    let size = usize::try_from(bytes.size).unwrap();
    let mut whole = bytes.head.clone();
    whole.resize(size - bytes.tail.len(), b'A');
    whole.extend(&bytes.tail);
    whole
}

fn whole(calls: &[Call]) -> Vec<Call> {
    let fill = |bytes: &OwnedBytes| OwnedBytes {
        size: bytes.size,
        head: filled(bytes),
        tail: Vec::new(),
    };
    calls
        .iter()
        .map(|(t, call)| {
            let what = match &call.what {
                HttpWhat::Received(bytes) => HttpWhat::Received(fill(bytes)),
                HttpWhat::Sent(bytes) => HttpWhat::Sent(fill(bytes)),
                other => other.clone(),
            };
            (*t, OwnedHttp { what, ..call.clone() })
        })
        .collect()
}

/// Cuts each call in pieces, all at its time.
fn in_pieces(calls: &[Call], cuts: &[Index]) -> Vec<Call> {
    let mut cuts = cuts.iter().cycle();
    let mut pieces = Vec::new();
    for (t, call) in whole(calls) {
        let (OwnedBytes { head, .. }, is_sent) = match &call.what {
            HttpWhat::Received(bytes) => (bytes.clone(), false),
            HttpWhat::Sent(bytes) => (bytes.clone(), true),
            _ => {
                pieces.push((t, call));
                continue;
            }
        };
        let mut rest = head.as_slice();
        loop {
            let at = cuts
                .next()
                .map_or(rest.len(), |cut| cut.index(rest.len().max(1)) + 1);
            let (piece, left) = rest.split_at(at.min(rest.len()));
            let bytes = OwnedBytes {
                size: piece.len() as u64,
                head: piece.to_vec(),
                tail: Vec::new(),
            };
            let what = if is_sent {
                HttpWhat::Sent(bytes)
            } else {
                HttpWhat::Received(bytes)
            };
            pieces.push((t, OwnedHttp { what, ..call.clone() }));
            rest = left;
            if rest.is_empty() {
                break;
            }
        }
    }
    pieces
}

fn any_case() -> impl Strategy<Value = Vec<Call>> {
    let cases: Vec<Vec<Call>> = cases().into_values().collect();
    prop::sample::select(cases)
}

proptest! {
    #![proptest_config(Config { cases: 300, ..Config::default() })]

    #[test]
    fn the_pieces_that_bytes_come_in_make_no_difference(
        calls in any_case(), cuts in prop::collection::vec(any::<Index>(), 1..30),
    ) {
        prop_assert_eq!(news_of(&in_pieces(&calls, &cuts)), news_of(&whole(&calls)));
    }

    /// With less captured there may be less to tell, but chunks keep their sizes and exchanges their ends.
    #[test]
    fn what_is_told_of_cut_calls_is_true(
        calls in any_case(), limits in prop::collection::vec((0_usize..1200, 0_usize..1200), 1..20),
    ) {
        let full = news_of(&whole(&calls)).0;
        let mut limits = limits.iter().cycle();
        let cut: Vec<Call> = whole(&calls)
            .into_iter()
            .map(|(t, mut call)| {
                if let HttpWhat::Received(bytes) | HttpWhat::Sent(bytes) = &mut call.what {
                    let &(first, last) = limits.next().unwrap();
                    let first = first.min(bytes.head.len());
                    let from = bytes.head.len() - last.min(bytes.head.len() - first);
                    bytes.tail = bytes.head[from..].to_vec();
                    bytes.head.truncate(first);
                }
                (t, call)
            })
            .collect();
        let (news, _) = news_of(&cut);
        let audio = |news: &[News]| -> BTreeSet<(u64, u64)> {
            news.iter()
                .filter_map(|news| match news.note {
                    Note::Audio(AudioChunk { bytes, .. }) => Some((news.time_ns, bytes)),
                    _ => None,
                })
                .collect()
        };
        // 0: the size is not known.
        let known = audio(&full);
        for chunk in audio(&news) {
            let is_known = known.contains(&chunk) || chunk.1 == 0;
            prop_assert!(is_known, "{:?} of {:?}", chunk, known);
        }
        check_order(&news)?;
    }

    /// Where calls are in pieces a recording may tell less of bodies, but heads and lengths stay.
    #[test]
    fn redaction_keeps_lengths_and_heads(
        calls in any_case(), cuts in prop::collection::vec(any::<Index>(), 1..8),
    ) {
        let calls = in_pieces(&calls, &cuts);
        let blanked = redacted(&calls);
        let sizes = |calls: &[Call]| -> Vec<(u64, usize, usize)> {
            calls
                .iter()
                .filter_map(|(_, call)| match &call.what {
                    HttpWhat::Received(bytes) | HttpWhat::Sent(bytes) => {
                        Some((bytes.size, bytes.head.len(), bytes.tail.len()))
                    }
                    _ => None,
                })
                .collect()
        };
        prop_assert_eq!(sizes(&blanked), sizes(&calls));
        let outcomes = |calls: &[Call]| news_of(calls).1.requests.iter().sum::<u64>();
        prop_assert_eq!(outcomes(&blanked), outcomes(&calls));
    }

    /// Whatever is lost: every exchange that was told of ends, once, and nothing stays.
    #[test]
    fn lost_calls_leave_nothing_behind(
        calls in any_case(), again in any_case(), lost in prop::collection::vec(any::<bool>(), 1..60),
    ) {
        let mut lost = lost.iter().cycle();
        let calls: Vec<Call> = calls
            .into_iter()
            .chain(again)
            .filter(|_| !lost.next().copied().unwrap_or_default())
            .collect();
        let mut connections = Connections::new();
        let mut news = Vec::new();
        for (time_ns, call) in &calls {
            connections.event(&call.event(*time_ns), &mut news);
            prop_assert!(connections.len() <= 1);
        }
        connections.process_gone(100, 1, &mut news);
        prop_assert_eq!((connections.len(), connections.exchanges()), (0, 0));
        check_order(&news)?;
    }
}

/// First an exchange is asked, last it ends, and nothing of it comes afterwards.
fn check_order(news: &[News]) -> Result<(), TestCaseError> {
    let mut open: BTreeMap<ExchangeId, u32> = BTreeMap::new();
    let mut over = BTreeSet::new();
    for News { exchange, note, .. } in news {
        prop_assert!(!over.contains(exchange), "{:?} after the end", note);
        match note {
            Note::Asked { .. } => prop_assert!(open.insert(*exchange, 0).is_none()),
            Note::Ended(_) => {
                prop_assert!(open.remove(exchange).is_some());
                over.insert(*exchange);
            }
            _ => *open.get_mut(exchange).unwrap() += 1,
        }
    }
    prop_assert!(open.is_empty(), "no end of {:?}", open);
    Ok(())
}

// ---- hostile ----

/// Bytes that look like something that the parser knows, and do not hold what they promise.
fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
    let words: Vec<&[u8]> = vec![
        b"POST /v1/audio/speech HTTP/1.1\r\n",
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"POST /v1/images/generations HTTP/1.1\r\ncontent-length: 18446744073709551615\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n",
        b"HTTP/1.1 999 \r\n\r\n",
        b"content-length: -1\r\n",
        b"x-request-id: \xff\xfe\r\n",
        b"\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"7fffffffffffffff\r\nx",
        b"0\r\n\r\n",
        b"5\r\nhello\r\n",
        b"event: speech.audio.delta\ndata: {\"type\":\"speech.audio.delta\",\"audio\":\"====\"}\n\n",
        b"data: {\"id\":\"chatcmpl-x\",\"modality\":\"audio\",\"frame_count\":4294967296,\"channels\":65536}\n\n",
        b"data: [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\n\n",
        b"{\"a\":\"\\",
        b"\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x81\x7f\x7f\xff\xff\xff\xff\xff\xff\xff",
        b"\x81\x7e\x00\x20{\"type\":\"audio.start\",\"sample_rate",
        b"\x88\x7f",
        b"\x16\x03\x01",
    ];
    let word = prop_oneof![
        8 => prop::sample::select(words).prop_map(<[u8]>::to_vec),
        2 => prop::collection::vec(any::<u8>(), 0..40),
        1 => (any::<u8>(), 0_usize..3000).prop_map(|(byte, times)| vec![byte; times]),
    ];
    prop::collection::vec(word, 0..6).prop_map(|words| words.concat())
}

fn hostile_calls() -> impl Strategy<Value = Vec<Call>> {
    let bytes = || {
        (
            hostile_bytes(),
            prop::option::of((0_u64..5_000_000, hostile_bytes())),
        )
            .prop_map(|(head, cut)| match cut {
                None => OwnedBytes {
                    size: head.len() as u64,
                    head,
                    tail: Vec::new(),
                },
                // Also a size below what was captured.
                Some((size, tail)) => OwnedBytes { size, head, tail },
            })
    };
    let what = prop_oneof![
        1 => Just(HttpWhat::Accepted),
        6 => bytes().prop_map(HttpWhat::Received),
        6 => bytes().prop_map(HttpWhat::Sent),
        1 => any::<i32>().prop_map(|errno| HttpWhat::Failed { errno }),
        1 => Just(HttpWhat::Closed),
    ];
    let call = (0_i32..3, what).prop_map(|(fd, what)| OwnedHttp {
        pid: 100,
        tid: 100,
        fd,
        what,
    });
    prop::collection::vec(call, 1..40).prop_map(|calls| (0_u64..).map(|n| n * 1_000_000).zip(calls).collect())
}

proptest! {
    #![proptest_config(Config { cases: 2000, ..Config::default() })]

    #[test]
    fn hostile_connections_are_counted_and_do_not_stay(calls in hostile_calls()) {
        let mut connections = Connections::new();
        let mut news = Vec::new();
        for (time_ns, call) in &calls {
            connections.event(&call.event(*time_ns), &mut news);
            prop_assert!(connections.len() <= 3);
            prop_assert!(connections.exchanges() <= 3 * 17);
        }
        connections.process_gone(100, 1, &mut news);
        prop_assert_eq!((connections.len(), connections.exchanges()), (0, 0));
        check_order(&news)?;
        let ended = news.iter().filter(|news| matches!(news.note, Note::Ended(_))).count() as u64;
        let counts = connections.counts();
        let sentences = news
            .iter()
            .filter(|news| matches!(&news.note, Note::Answered { status: 101, .. }))
            .count() as u64;
        prop_assert!(ended - sentences <= counts.requests.iter().sum());
        // What begins no request is a break.
        let opens = |call: &OwnedHttp| match &call.what {
            HttpWhat::Received(bytes) => bytes.size > 0 && !bytes.head.is_empty(),
            _ => false,
        };
        let is_new = matches!(calls[0].1.what, HttpWhat::Accepted);
        if is_new && calls.get(1).is_some_and(|(_, call)| call.fd == calls[0].1.fd && opens(call)) {
            let told = counts.requests.iter().chain(&counts.unsupported).sum::<u64>() + counts.breaks;
            let is_open_line = matches!(&calls[1].1.what, HttpWhat::Received(bytes)
                if bytes.head.iter().all(|byte| matches!(byte, b'\r' | b'\n')));
            prop_assert!(told > 0 || is_open_line || is_half_a_head(&calls[1].1));
        }
    }
}

/// A request whose head is not over.
fn is_half_a_head(call: &OwnedHttp) -> bool {
    let HttpWhat::Received(bytes) = &call.what else {
        return false;
    };
    !bytes.head.windows(4).any(|window| window == b"\r\n\r\n")
}

// ---- limits and ends ----

fn accept(connections: &mut Connections, fd: i32) {
    let accepted = HttpEvent::Accepted {
        pid: 1,
        tid: 1,
        fd,
        time_ns: 0,
    };
    connections.event(&accepted, &mut Vec::new());
}

#[test]
fn no_more_connections_are_followed_than_there_is_room_for() {
    let mut connections = Connections::new();
    for fd in 0..20_000 {
        accept(&mut connections, fd);
    }
    assert_eq!((connections.len(), connections.counts().refused), (16_384, 3_616));
    connections.tick(3_600_000_000_001, &mut Vec::new());
    assert_eq!(connections.len(), 0, "those whose end was lost go");
}

#[test]
fn a_connection_is_adopted_by_a_request_and_by_nothing_else() {
    let mut connections = Connections::new();
    let mut news = Vec::new();
    let mut receive = |fd, head: &[u8]| {
        let size = head.len() as u64;
        let received = HttpEvent::Received {
            pid: 1,
            tid: 1,
            fd,
            time_ns: 5,
            size,
            head,
            tail: &[],
        };
        connections.event(&received, &mut news);
        connections.len()
    };
    assert_eq!(receive(1, b"\x00\x01\x02"), 0);
    assert_eq!(receive(1, b"PO"), 0);
    assert_eq!(receive(-77, b"POST /v1/audio/speech HTTP/1.1\r\n"), 1);
}

#[test]
fn another_connection_under_the_same_number_is_another_one() {
    let mut calls = case("speech_pcm");
    // The client's end and the close are lost.
    calls.truncate(4);
    let mut again = calls.clone();
    again.extend(calls.clone());
    let mut connections = Connections::new();
    let mut news = Vec::new();
    for (time_ns, call) in &again {
        connections.event(&call.event(*time_ns), &mut news);
    }
    let ends: Vec<&Note> = news
        .iter()
        .map(|news| &news.note)
        .filter(|note| matches!(note, Note::Ended(_)))
        .collect();
    assert_eq!(ends, [&Note::Ended(End::Lost)]);
    assert_eq!(connections.exchanges(), 1);
}
