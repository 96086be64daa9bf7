//! Keys and control messages of connectors.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

mod support;

use std::path::Path;

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoder, FrameResult, FrameType},
        connector::{Key, Kind},
        control::{Control, control},
        engine::Payload,
        frame::Frame,
        message::Message,
    },
};
use proptest::prelude::*;
use rstest::rstest;
use serde::Deserialize;
use support::{PID, bytes, frame};

fn key(kind: Kind, request_id: &str, stages: (Option<u32>, Option<u32>), chunk: Option<u32>) -> Key<'_> {
    Key {
        kind,
        request_id,
        from_stage: stages.0,
        to_stage: stages.1,
        chunk,
        ranks: None,
    }
}

#[rstest]
#[case(
    "/speech-0123456789abcdef-1a2b3c4d_0_12",
    "speech-0123456789abcdef-1a2b3c4d",
    0,
    12
)]
#[case("replay-12345-7_0_3", "replay-12345-7", 0, 3)]
#[case(
    "0_6f1c7e0a-1d3e-4c55-9d6a-0d6f2f3b1c11_1_0",
    "0_6f1c7e0a-1d3e-4c55-9d6a-0d6f2f3b1c11",
    1,
    0
)]
#[case("chatcmpl-my_id-12345678_2_1", "chatcmpl-my_id-12345678", 2, 1)]
fn a_chunk_is_known_by_its_segment(
    #[case] name: &str,
    #[case] id: &str,
    #[case] from: u32,
    #[case] chunk: u32,
) {
    let want = key(Kind::Chunk, id, (Some(from), None), Some(chunk));
    assert_eq!(Key::of_segment(name), Some(want));
}

#[test]
fn a_kv_cache_is_known_by_its_segment() {
    let whole = key(Kind::KvCache, "chatcmpl-a-1a2b3c4d", (Some(0), Some(1)), None);
    assert_eq!(
        Key::of_segment("omni_0_to_1_kv_cache_chatcmpl-a-1a2b3c4d"),
        Some(whole)
    );
    let share = Key {
        ranks: Some((2, 3)),
        ..key(Kind::KvCache, "chatcmpl-a-1a2b3c4d", (Some(1), None), Some(0))
    };
    assert_eq!(Key::of_segment("chatcmpl-a-1a2b3c4d_1_0_2_3"), Some(share));
}

#[rstest]
#[case::python("psm_1a2b3c4d")]
#[case::python_with_numbers("psm_1a-2b_0_1")]
#[case::pytorch("torch_12345_67890_0")]
#[case::semaphore("sem.mp-abc_0_1")]
#[case::lock_file("shm_speech-a-1a2b3c4d_0_1_lockfile.lock")]
#[case::openmp("__KMP_REGISTERED_LIB_1_1000")]
#[case::no_hyphen("anything_0_1")]
#[case::process_ids("my-lib_34567_1")]
#[case::no_chunk("speech-a-1a2b3c4d_0")]
#[case::no_id("_0_1")]
#[case::leading_zero("speech-a_00_1")]
#[case::sign("speech-a_+0_1")]
#[case::path("a-b/c_0_1")]
#[case::control_character("a-b\n_0_1")]
#[case::half_a_kv_key("omni_0_to_x_kv_cache_abc")]
#[case::kv_without_id("omni_0_to_1_kv_cache_")]
#[case::nothing("")]
fn other_segments_are_no_connectors(#[case] name: &str) {
    assert_eq!(Key::of_segment(name), None);
}

#[rstest]
#[case::mooncake("req0_0_1@0_1", key(Kind::Chunk, "req0", (Some(0), Some(1)), Some(1)))]
#[case::yuanrong("a-b_0_1:0_2", key(Kind::Chunk, "a-b", (Some(0), Some(2)), Some(1)))]
#[case::stages_behind_an_id("a@b@3_4", key(Kind::Other, "a@b", (Some(3), Some(4)), None))]
#[case::nixl("a-b_0_1", key(Kind::Chunk, "a-b", (Some(0), None), Some(1)))]
#[case::no_stages("a@b", key(Kind::Other, "a@b", (None, None), None))]
#[case::kv("omni_0_to_1_kv_cache_r@0_1", key(Kind::KvCache, "r", (Some(0), Some(1)), None))]
fn keys_of_messages(#[case] text: &str, #[case] want: Key<'_>) {
    assert_eq!(Key::of_message(text), Some(want));
}

#[test]
fn a_key_without_end_is_none() {
    assert_eq!(Key::of_message(&"x".repeat(513)), None);
    assert_eq!(Key::of_segment(&format!("{}-a_0_1", "x".repeat(255))), None);
}

const RAW: &str = "speech-0123456789abcdef-1a2b3c4d_0_2";
const STAGED: &str = "speech-0123456789abcdef-1a2b3c4d_0_2@0_1";
const ATTEMPT: &str = "5f0c9a7be2d84d7f9d3a6b1c2e4f8a90";
const SIZE: u64 = 262_144;

/// What `tests/frames/connectors.py` encodes with vLLM-Omni's own classes, and what each must say.
fn messages() -> Vec<(String, Vec<u8>, Control<'static>)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames/connectors.jsonl");
    let text = std::fs::read_to_string(file).unwrap();
    text.lines()
        .map(|line| {
            let Line { name, hex } = serde_json::from_str(line).unwrap();
            let want = want(&name);
            (name, bytes(&hex), want)
        })
        .collect()
}

#[derive(Deserialize)]
struct Line {
    name: String,
    hex: String,
}

fn want(name: &str) -> Control<'static> {
    match name {
        "mooncake query" | "mori query" | "yuanrong query" => Control::Query { key: STAGED },
        "mooncake info" | "mori info" => Control::Info {
            key: STAGED,
            size: SIZE,
        },
        "mooncake pull" | "mori pull" => Control::Pull {
            key: STAGED,
            size: SIZE,
        },
        "mooncake done" | "mori done" => Control::Done { written: true },
        "mooncake error" => Control::Done { written: false },
        "nixl claim" => Control::Claim {
            key: RAW,
            claim: ATTEMPT,
        },
        "nixl offer" => Control::Offer {
            claim: ATTEMPT,
            size: Some(SIZE),
        },
        "nixl released" => Control::Released {
            key: RAW,
            claim: ATTEMPT,
        },
        "yuanrong ready" => Control::Ready {
            key: STAGED,
            size: SIZE,
        },
        "yuanrong read" => Control::Read { key: STAGED },
        _ => Control::Nothing,
    }
}

fn message(name: &str) -> Vec<u8> {
    let found = messages().into_iter().find(|(of, ..)| of == name);
    found.unwrap().1
}

fn decoder(role: Role) -> Decoder {
    let mut decoder = Decoder::new();
    decoder.process_known(PID, role, Flavor::Omni, &Versions::default());
    decoder
}

const STAGE: Role = Role::LlmStage {
    stage: Some(0),
    replica: Some(0),
};

#[rstest]
#[case::of_a_stage(STAGE)]
#[case::of_a_worker(Role::Worker)]
fn control_messages_are_told_from_an_engines(#[case] role: Role) {
    let mut decoder = decoder(role);
    for (name, payload, want) in &messages() {
        let want = *want;
        let asked = decoder.frame(&frame(payload));
        assert_eq!(
            (asked.kind, asked.result),
            (FrameType::Connector, FrameResult::Decoded),
            "{name}"
        );
        let Content::Message { message, .. } = asked.content else {
            panic!("{name}")
        };
        let peer = None;
        assert_eq!(message, Message::Connector { control: want, peer }, "{name}");

        // As an answer: whom it is for, nothing, what it says.
        for part in [&[0, 1, 2, 3, 4][..], &[]] {
            let part = Frame {
                more: true,
                ..frame(part)
            };
            let part = decoder.frame(&part);
            assert_eq!(
                (part.kind, part.result),
                (FrameType::Envelope, FrameResult::Part),
                "{name}"
            );
        }
        let answer = decoder.frame(&frame(payload));
        let Content::Message { message, .. } = answer.content else {
            panic!("{name}")
        };
        let peer = Some(0x0102_0304);
        assert_eq!(message, Message::Connector { control: want, peer }, "{name}");
        assert_eq!(decoder.open_messages(), 0);
    }
}

#[test]
fn a_worker_is_listened_to_for_its_connector_alone() {
    let mut decoder = decoder(Role::Worker);
    let dead = decoder.frame(&frame(b"ENGINE_CORE_DEAD"));
    assert_eq!(dead.result, FrameResult::Ignored);
}

#[test]
fn redaction_keeps_what_is_decoded() {
    let mut decoder = decoder(STAGE);
    for (name, payload, want) in messages() {
        let kind = decoder.frame(&frame(&payload)).kind;
        let mut redacted = payload.clone();
        decoder.redact(PID, kind, payload.len() as u64, &mut redacted, &mut []);
        let again = decoder.frame(&frame(&redacted));
        let Content::Message { message, .. } = again.content else {
            panic!("{name}")
        };
        assert_eq!(
            message,
            Message::Connector {
                control: want,
                peer: None
            },
            "{name}"
        );
    }
    let mut offer = message("nixl offer");
    decoder.redact(PID, FrameType::Connector, offer.len() as u64, &mut offer, &mut []);
    assert!(
        !offer.windows(4).any(|window| window == b"aaaa"),
        "descriptors are blanked"
    );
}

#[test]
fn an_offer_that_is_cut_is_read_from_its_end() {
    let whole = message("nixl offer");
    let mut decoder = decoder(STAGE);
    for kept in 120..220 {
        let (mut head, mut tail) = (whole[..100].to_vec(), whole[whole.len() - kept..].to_vec());
        let size = whole.len() as u64;
        for redacted in [false, true] {
            let cut = Frame {
                size,
                tail: &tail,
                ..frame(&head)
            };
            let decoded = decoder.frame(&cut);
            let Content::Message { message, .. } = decoded.content else {
                // The size lies 128 bytes before the end.
                assert!(kept < 170 && !redacted, "{kept} {decoded:?}");
                break;
            };
            let control = Control::Offer {
                claim: ATTEMPT,
                size: Some(SIZE),
            };
            assert_eq!(message, Message::Connector { control, peer: None });
            decoder.redact(PID, FrameType::Connector, size, &mut head, &mut tail);
        }
    }
}

#[test]
fn what_lacks_its_key_is_malformed() {
    let mut decoder = decoder(STAGE);
    for payload in [
        &b"query_info\x80"[..],
        b"nixl_get_meta\x81\xa3key\xa1k",
        b"query_info\x91\x01",
        b"cleanup_key\x80",
    ] {
        let decoded = decoder.frame(&frame(payload));
        assert_eq!(
            (decoded.kind, decoded.result),
            (FrameType::Connector, FrameResult::Malformed)
        );
    }
}

proptest! {
    #[test]
    fn any_text_is_a_key_or_none(text in "\\PC{0,40}") {
        for key in [Key::of_segment(&text), Key::of_message(&text)].into_iter().flatten() {
            prop_assert!(text.contains(key.request_id) && !key.request_id.is_empty());
        }
    }

    #[test]
    fn a_chunks_key_gives_its_parts(id in "[a-z0-9_]{0,8}-[a-f0-9]{8}", from in 0..1024_u32, chunk in any::<u32>()) {
        let text = format!("{id}_{from}_{chunk}");
        prop_assert_eq!(Key::of_segment(&text), Some(key(Kind::Chunk, &id, (Some(from), None), Some(chunk))));
        let staged = format!("{text}@{from}_7");
        prop_assert_eq!(
            Key::of_message(&staged),
            Some(key(Kind::Chunk, &id, (Some(from), Some(7)), Some(chunk)))
        );
    }

    /// Damage is an error or another message, never more.
    #[test]
    fn damaged_messages_do_no_harm(which in 0..22_usize, at in any::<prop::sample::Index>(), byte: u8, cut in any::<prop::sample::Index>()) {
        let (_, mut payload, _) = messages().swap_remove(which);
        let at = at.index(payload.len());
        payload[at] = byte;
        payload.truncate(cut.index(payload.len() + 1));
        let _ = control(Payload::whole(&payload));
        let mut decoder = decoder(Role::Worker);
        let kind = decoder.frame(&frame(&payload)).kind;
        let size = payload.len() as u64;
        decoder.redact(PID, kind, size, &mut payload, &mut []);
    }
}
