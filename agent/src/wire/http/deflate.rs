//! Compressed messages of a WebSocket (RFC 7692), where not all that came before them is known.
//!
//! A message may repeat bytes of earlier ones. Texts are captured whole, audio is not: what a text repeats of audio comes
//! out as [`HOLE`], which no JSON text has by itself.

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{
        DecompressorOxide, decompress,
        inflate_flags::{TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF},
    },
};

/// Stands for a byte that is not known.
pub(super) const HOLE: u8 = 0;

/// How far back a message may refer.
const WINDOW: usize = 32 * 1024;
/// Longest text: the start of a sentence has its text. More is an error.
const MAX_TEXT: usize = 16 * 1024;
/// What ends each message, and is not sent.
const END: [u8; 4] = [0, 0, 0xff, 0xff];

/// One direction of a compressed WebSocket.
#[derive(Clone, Debug, Default)]
pub(super) struct Inflater {
    /// The last texts, behind the last bytes that are not known.
    history: Vec<u8>,
}

impl Inflater {
    /// A message passed whose content is not known.
    pub(super) fn forget(&mut self) {
        self.history.clear();
    }

    /// The text of a message. `None`: it is damaged or too long.
    pub(super) fn text(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let mut out = vec![HOLE; WINDOW + MAX_TEXT];
        let from = WINDOW - self.history.len();
        out.get_mut(from..WINDOW)?.copy_from_slice(&self.history);
        let input = [message, &END].concat();
        let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_HAS_MORE_INPUT;
        let mut decompressor = DecompressorOxide::new();
        let (status, _, len) = decompress(&mut decompressor, &input, &mut out, WINDOW, flags);
        if !matches!(status, TINFLStatus::NeedsMoreInput | TINFLStatus::Done) {
            self.forget();
            return None;
        }
        let text = out.get(WINDOW..WINDOW + len)?.to_vec();
        self.history.extend_from_slice(&text);
        let surplus = self.history.len().saturating_sub(WINDOW);
        self.history.drain(..surplus);
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compress, Compression, FlushCompress};
    use proptest::prelude::*;

    use super::*;

    /// Messages as a server that keeps its window compresses them.
    fn compressed(messages: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut compress = Compress::new(Compression::default(), false);
        messages
            .iter()
            .map(|message| {
                let mut out = Vec::with_capacity(message.len() + 100);
                compress
                    .compress_vec(message, &mut out, FlushCompress::Sync)
                    .unwrap();
                out.truncate(out.len() - END.len());
                out
            })
            .collect()
    }

    #[test]
    fn texts_that_repeat_texts() {
        let texts: [&[u8]; 3] = [
            br#"{"type":"audio.start","utterance_index":0}"#,
            br#"{"type":"audio.done","utterance_index":0}"#,
            br#"{"type":"audio.start","utterance_index":1}"#,
        ];
        let mut inflater = Inflater::default();
        for (text, message) in texts.iter().zip(compressed(&texts)) {
            assert_eq!(inflater.text(&message).as_deref(), Some(*text));
        }
    }

    #[test]
    fn what_is_repeated_of_bytes_unknown_is_a_hole() {
        let messages = compressed(&[
            b"samples of sound",
            b"this is no sample at all, nor samples of sound",
        ]);
        let mut inflater = Inflater::default();
        inflater.forget();
        let text = inflater.text(&messages[1]).unwrap();
        assert!(text.starts_with(b"this is no"), "{text:?}");
        assert!(text.windows(10).any(|part| part == [HOLE; 10]), "{text:?}");
        assert_eq!(text.len(), 46);
    }

    #[test]
    fn a_bomb_is_damaged() {
        let long = vec![b'a'; MAX_TEXT + 1];
        let messages = compressed(&[&long]);
        assert_eq!(Inflater::default().text(&messages[0]), None);
    }

    proptest! {
        #[test]
        fn nothing_panics_or_grows(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20)) {
            let mut inflater = Inflater::default();
            for message in &messages {
                let text = inflater.text(message);
                prop_assert!(text.is_none_or(|text| text.len() <= MAX_TEXT));
                prop_assert!(inflater.history.len() <= WINDOW);
            }
        }
    }
}
