//! The first and last bytes of a text that passes in stretches.

use std::borrow::Cow;

use super::stretch::{Part, Stretch};

/// A text of which the ends are kept.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    first: Vec<u8>,
    /// The last bytes behind `first`, without a gap among them.
    last: Vec<u8>,
    len: u64,
    has_gap: bool,
    max_first: usize,
    max_last: usize,
}

/// What is known of a text: all of it as `head`, or its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known<'a> {
    pub(super) head: Cow<'a, [u8]>,
    /// The last bytes, where some are missing between them and the head.
    pub(super) tail: Option<&'a [u8]>,
    /// Bytes of the whole text.
    pub(super) len: u64,
}

impl Ends {
    pub(super) fn new(max_first: usize, max_last: usize) -> Self {
        Self {
            first: Vec::new(),
            last: Vec::new(),
            len: 0,
            has_gap: false,
            max_first,
            max_last,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether bytes passed that were not known.
    pub(super) fn has_gap(&self) -> bool {
        self.has_gap
    }

    pub(super) fn push(&mut self, stretch: Stretch<'_>) {
        for part in stretch.parts() {
            match part {
                Part::Known(bytes) => self.push_known(bytes),
                Part::Gap(gap) => {
                    self.has_gap = true;
                    self.len = self.len.saturating_add(gap);
                    self.last.clear();
                }
            }
        }
    }

    fn push_known(&mut self, bytes: &[u8]) {
        self.len = self.len.saturating_add(bytes.len() as u64);
        let room = if self.has_gap {
            0
        } else {
            self.max_first - self.first.len()
        };
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.first.extend_from_slice(first);
        let rest = rest
            .get(rest.len().saturating_sub(self.max_last)..)
            .unwrap_or_default();
        let surplus = (self.last.len() + rest.len()).saturating_sub(self.max_last);
        self.last.drain(..surplus);
        self.last.extend_from_slice(rest);
    }

    pub(super) fn known(&self) -> Known<'_> {
        let is_whole = (self.first.len() + self.last.len()) as u64 == self.len;
        let (head, tail) = match (is_whole, self.last.is_empty()) {
            (true, true) => (Cow::Borrowed(self.first.as_slice()), None),
            (true, false) => (
                Cow::Owned([self.first.as_slice(), self.last.as_slice()].concat()),
                None,
            ),
            (false, _) => (Cow::Borrowed(self.first.as_slice()), Some(self.last.as_slice())),
        };
        Known {
            head,
            tail,
            len: self.len,
        }
    }

    /// All of it so far, where that is known.
    pub(super) fn before(&self) -> Option<Vec<u8>> {
        let known = self.known();
        known.tail.is_none().then(|| known.head.into_owned())
    }

    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.last.clear();
        self.len = 0;
        self.has_gap = false;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_kept_does_not_depend_on_the_pieces(
            text in prop::collection::vec(any::<u8>(), 0..60), cuts in prop::collection::vec(1_usize..20, 0..20),
        ) {
            let mut whole = Ends::new(10, 8);
            whole.push(Stretch::known(&text));
            let mut pieces = Ends::new(10, 8);
            let mut rest = text.as_slice();
            for cut in cuts {
                let (piece, left) = rest.split_at(cut.min(rest.len()));
                pieces.push(Stretch::known(piece));
                rest = left;
            }
            pieces.push(Stretch::known(rest));
            prop_assert_eq!(pieces.known(), whole.known());
            let known = whole.known();
            prop_assert_eq!(known.tail.is_none(), text.len() <= 18);
            prop_assert!(text.starts_with(&known.head));
            prop_assert!(text.ends_with(known.tail.unwrap_or_default()));
        }
    }

    #[test]
    fn a_gap_ends_the_head_and_begins_the_tail_anew() {
        let mut ends = Ends::new(10, 8);
        ends.push(Stretch::new(20, b"abc", b"xyz"));
        ends.push(Stretch::known(b"12"));
        let known = ends.known();
        assert_eq!(
            (known.head.as_ref(), known.tail, known.len),
            (b"abc".as_slice(), Some(b"xyz12".as_slice()), 22)
        );
    }
}
