//! Nothing from outside makes the decoders panic; cut frames say the part of the truth that they hold;
//! redaction takes content and nothing else.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

mod support;

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoded, Decoder, FrameResult, FrameType},
        frame::Frame,
        message::{EngineOutputs, Message},
        msgpack::{MsgpackError, Reader},
    },
};
use proptest::prelude::*;
use support::{Case, PID, cases, frame};

/// Capture lengths of a tail: none, less than any trailer, about one, more.
const TAILS: [usize; 6] = [0, 8, 33, 64, 200, 1000];

/// Where the element `index` of the outer array starts.
fn offset_of(payload: &[u8], index: u32) -> usize {
    let mut reader = Reader::new(payload);
    reader.array().unwrap();
    reader.skip_many(index).unwrap();
    reader.offset()
}

fn outputs_of<'a, 'b>(decoded: &'b Decoded<'a>) -> Option<&'b EngineOutputs<'a>> {
    match &decoded.content {
        Content::Message {
            message: Message::Outputs(outputs),
            ..
        } => Some(outputs),
        _ => None,
    }
}

fn ends(payload: &[u8], head: usize, tail: usize) -> (&[u8], &[u8]) {
    (&payload[..head], &payload[payload.len() - tail..])
}

/// Each way to cut a frame in two, with the bytes between lost.
fn cuts(payload: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let len = payload.len();
    (0..len).flat_map(move |head| {
        TAILS
            .into_iter()
            .filter(move |tail| head + tail <= len)
            .map(move |tail| (head, tail))
    })
}

#[test]
fn cut_outputs_hold_a_part_of_the_truth() {
    for case in cases().iter().filter(|case| case.kind == "outputs") {
        let payload = case.payload();
        let mut decoder = case.decoder(&case.versions());
        let decoded = case.decode(&mut decoder, payload.len(), &payload, &[]);
        let whole = outputs_of(&decoded).unwrap().clone();
        let statistics = offset_of(&payload, 2);
        // The largest frames differ from others only in the number of outputs: every 7th cut is enough of
        // them.
        let step = if payload.len() > 2000 { 7 } else { 1 };
        for (head, tail) in cuts(&payload).step_by(step) {
            let mut decoder = case.decoder(&case.versions());
            let (first, last) = ends(&payload, head, tail);
            let cut = case.decode(&mut decoder, payload.len(), first, last);
            let Some(cut) = outputs_of(&cut) else {
                assert!(
                    head < offset_of(&payload, 1) + 3,
                    "{}: {head} bytes are enough: {cut:?}",
                    case.name
                );
                continue;
            };
            let place = || format!("{} cut to {head} and {tail} bytes", case.name);
            assert_eq!(cut.outputs, whole.outputs[..cut.outputs.len()], "{}", place());
            assert_eq!(
                cut.outputs.len() + cut.outputs_lost as usize,
                whole.outputs.len(),
                "{}",
                place()
            );
            if payload.len() - tail <= statistics {
                let all = EngineOutputs {
                    outputs: cut.outputs.clone(),
                    outputs_lost: cut.outputs_lost,
                    ..whole.clone()
                };
                assert_eq!(cut, &all, "{}", place());
            }
            assert!(
                cut.timestamp.is_none() || cut.timestamp == whole.timestamp,
                "{}",
                place()
            );
            assert!(cut.stats.is_none() || cut.stats == whole.stats, "{}", place());
            assert!(
                whole.finished_requests.starts_with(&cut.finished_requests),
                "{}",
                place()
            );
        }
    }
}

#[test]
fn cut_requests_hold_a_part_of_the_truth() {
    for case in cases().iter().filter(|case| case.kind == "add") {
        let payload = case.payload();
        let mut decoder = case.decoder(&case.versions());
        let decoded = case.decode(&mut decoder, payload.len(), &payload, &[]);
        let Content::Message {
            message: Message::Add(whole),
            ..
        } = decoded.content
        else {
            panic!("{}: {decoded:?}", case.name);
        };
        let prompt = offset_of(&payload, 1);
        let sampling = offset_of(&payload, 3);
        for (head, tail) in cuts(&payload) {
            let mut decoder = case.decoder(&case.versions());
            let (first, last) = ends(&payload, head, tail);
            let cut = case.decode(&mut decoder, payload.len(), first, last);
            let Content::Message {
                message: Message::Add(cut),
                ..
            } = cut.content
            else {
                assert!(head < prompt, "{}: {head} bytes are enough: {cut:?}", case.name);
                continue;
            };
            let place = || format!("{} cut to {head} and {tail} bytes", case.name);
            assert_eq!(cut.request_id, whole.request_id);
            assert!(
                cut.prompt_tokens.is_none() || cut.prompt_tokens == whole.prompt_tokens,
                "{}",
                place()
            );
            assert!(
                cut.arrival.is_none() || cut.arrival == whole.arrival,
                "{}",
                place()
            );
            assert!(
                cut.max_tokens.is_none() || cut.max_tokens == whole.max_tokens,
                "{}",
                place()
            );
            if head >= prompt + 3 && payload.len() - tail <= sampling && !whole.is_pooling {
                assert_eq!(cut, whole, "{}", place());
            }
        }
    }
}

/// Content in the fixtures that must not survive.
const SECRETS: [&[u8]; 4] = [b"</s>", b"00-4bf9", b"User:", b"extra_args"];

fn redacted(decoder: &Decoder, kind: FrameType, size: usize, head: &[u8], tail: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut head, mut tail) = (head.to_vec(), tail.to_vec());
    decoder.redact(PID, kind, size as u64, &mut head, &mut tail);
    (head, tail)
}

fn assert_same_after_redaction(case: &Case, size: usize, head: &[u8], tail: &[u8]) -> Result<(), String> {
    let mut decoder = case.decoder(&case.versions());
    let decoded = case.decode(&mut decoder, size, head, tail);
    let (new_head, new_tail) = redacted(&decoder, decoded.kind, size, head, tail);
    if !matches!(decoded.result, FrameResult::Decoded | FrameResult::Partial) {
        return Ok(());
    }
    let mut decoder = case.decoder(&case.versions());
    let again = case.decode(&mut decoder, size, &new_head, &new_tail);
    if again != decoded {
        return Err(format!(
            "{}: {} and {} of {size} bytes: {decoded:?}\nbecame {again:?}",
            case.name,
            head.len(),
            tail.len()
        ));
    }
    Ok(())
}

#[test]
fn a_redacted_frame_decodes_to_the_same_message() {
    for case in cases() {
        let payload = case.payload();
        assert_same_after_redaction(&case, payload.len(), &payload, &[]).unwrap();
        let step = if payload.len() > 2000 { 7 } else { 1 };
        for (head, tail) in cuts(&payload).step_by(step) {
            let (head, tail) = ends(&payload, head, tail);
            assert_same_after_redaction(&case, payload.len(), head, tail).unwrap();
        }
    }
}

#[test]
fn redaction_takes_the_content() {
    let mut taken = 0;
    for case in cases() {
        let payload = case.payload();
        let mut decoder = case.decoder(&case.versions());
        let kind = case.decode(&mut decoder, payload.len(), &payload, &[]).kind;
        let (new, _) = redacted(&decoder, kind, payload.len(), &payload, &[]);
        for secret in SECRETS {
            let has = |bytes: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
            taken += usize::from(has(&payload));
            assert!(!has(&new), "{}: {}", case.name, String::from_utf8_lossy(secret));
        }
        if kind == FrameType::Add {
            let mut prompt = Reader::new(&new[offset_of(&new, 1)..]);
            if !prompt.take_nil() {
                for _ in 0..prompt.array().unwrap() {
                    assert_eq!(prompt.u64(), Ok(0), "{}: a token id is left", case.name);
                }
            }
        }
    }
    assert!(taken > 50, "only {taken} secrets were in the frames at all");
}

fn any_decoder(flavor: Flavor, role: Role, versions: &Versions) -> Decoder {
    let mut decoder = Decoder::new();
    decoder.process_known(PID, role, flavor, versions);
    decoder
}

fn flavor() -> impl Strategy<Value = Flavor> {
    prop_oneof![Just(Flavor::Vllm), Just(Flavor::Omni)]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![
        Just(Role::ApiServer),
        Just(Role::LlmStage {
            stage: None,
            replica: None
        }),
        Just(Role::DiffusionStage {
            stage: None,
            replica: None
        }),
    ]
}

fn versions() -> impl Strategy<Value = Versions> {
    let version = || proptest::option::of((18_u16..36).prop_map(|minor| format!("0.{minor}.0")));
    (version(), version()).prop_map(|(vllm, omni)| Versions { vllm, omni })
}

/// Bytes that look like msgpack more often than chance would have it.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        3 => any::<u8>(),
        2 => Just(0xc0_u8),
        2 => prop::sample::select(vec![0x98_u8, 0x99, 0x91, 0x90, 0xdc, 0xdd, 0x81, 0xde, 0xdf, 0xa1, 0xd9, 0xcb, 0xc7]),
        1 => 0_u8..4,
    ];
    prop::collection::vec(byte, 0..200)
}

/// Head, tail, `more`, `aux`, bytes lost between.
type Part = (Vec<u8>, Vec<u8>, bool, bool, u64);

fn frames() -> impl Strategy<Value = Vec<Part>> {
    let part = (
        bytes(),
        bytes(),
        any::<bool>(),
        prop::bool::weighted(0.2),
        0_u64..300,
    );
    prop::collection::vec(part, 1..12)
}

proptest! {
    #[test]
    fn no_sequence_of_frames_makes_it_panic(
        flavor in flavor(), role in role(), versions in versions(), frames in frames(),
    ) {
        let mut decoder = any_decoder(flavor, role, &versions);
        for (head, tail, more, aux, missing) in &frames {
            let size = (head.len() + tail.len()) as u64 + missing;
            let part = Frame { tail, more: *more, aux: *aux, size, ..frame(head) };
            let decoded = decoder.frame(&part);
            let (new_head, new_tail) = redacted(&decoder, decoded.kind, usize::try_from(size).unwrap(), head, tail);
            prop_assert_eq!((new_head.len(), new_tail.len()), (head.len(), tail.len()));
        }
        prop_assert!(decoder.open_messages() <= 1);
    }

    #[test]
    fn a_damaged_frame_makes_nothing_panic_and_redacts_soundly(
        index in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        tail in 0_usize..300,
    ) {
        let all = cases();
        let case = index.get(&all);
        let mut payload = case.payload();
        for (at, value) in &flips {
            *at.get_mut(&mut payload) = *value;
        }
        prop_assert_eq!(assert_same_after_redaction(case, payload.len(), &payload, &[]), Ok(()));
        let head = cut.index(payload.len());
        let (first, last) = ends(&payload, head, tail.min(payload.len() - head));
        prop_assert_eq!(assert_same_after_redaction(case, payload.len(), first, last), Ok(()));
    }

    #[test]
    fn skip_reads_no_more_than_there_is(bytes in bytes()) {
        let mut reader = Reader::new(&bytes);
        if reader.skip().is_ok() {
            prop_assert!(reader.offset() <= bytes.len() && reader.offset() > 0);
        }
        // Where it is cut, it says so, and nothing else.
        let end = reader.offset();
        if end > 0 && Reader::new(&bytes).skip().is_ok() {
            for cut in 0..end {
                let mut reader = Reader::of_head(&bytes[..cut], end as u64);
                prop_assert!(reader.skip().is_err_and(MsgpackError::is_truncated));
            }
        }
    }
}
