//! A stretch of a byte stream that is known at its ends and perhaps not between them.

/// Bytes in a row: `head`, then `gap` unknown ones, then `tail`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stretch<'a> {
    head: &'a [u8],
    gap: u64,
    tail: &'a [u8],
}

/// A part of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Known(&'a [u8]),
    Gap(u64),
}

impl<'a> Stretch<'a> {
    /// `size` bytes of which the first and last are known. More than `size` bytes are cut off.
    pub(super) fn new(size: u64, head: &'a [u8], tail: &'a [u8]) -> Self {
        let head = first(head, size);
        let left = size - head.len() as u64;
        let from = tail.len() - first(tail, left).len();
        let tail = tail.get(from..).unwrap_or_default();
        Self {
            head,
            gap: left - tail.len() as u64,
            tail,
        }
    }

    pub(super) fn known(bytes: &'a [u8]) -> Self {
        Self {
            head: bytes,
            gap: 0,
            tail: &[],
        }
    }

    pub(super) fn len(self) -> u64 {
        self.head.len() as u64 + self.gap + self.tail.len() as u64
    }

    pub(super) fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The bytes up to the first that is not known.
    pub(super) fn start(self) -> &'a [u8] {
        if self.head.is_empty() && self.gap == 0 {
            self.tail
        } else {
            self.head
        }
    }

    /// In two, the first of which has `at` bytes or all there are.
    pub(super) fn split(self, at: u64) -> (Self, Self) {
        let Self { head, gap, tail } = self;
        let head_len = head.len() as u64;
        if at <= head_len {
            let (head, rest) = head.split_at(first(head, at).len());
            let rest = Self {
                head: rest,
                gap,
                tail,
            };
            return (Self::known(head), rest);
        }
        let at = at - head_len;
        if at <= gap {
            let left = Self {
                head,
                gap: at,
                tail: &[],
            };
            let right = Self {
                head: &[],
                gap: gap - at,
                tail,
            };
            return (left, right);
        }
        let (tail, rest) = tail.split_at(first(tail, at - gap).len());
        (Self { head, gap, tail }, Self::known(rest))
    }

    /// What it is made of, in order, without empty parts.
    pub(super) fn parts(self) -> impl Iterator<Item = Part<'a>> {
        [
            Part::Known(self.head),
            Part::Gap(self.gap),
            Part::Known(self.tail),
        ]
        .into_iter()
        .filter(|part| !matches!(part, Part::Known([]) | Part::Gap(0)))
    }
}

/// The first `size` bytes, or all there are.
fn first(bytes: &[u8], size: u64) -> &[u8] {
    let size = usize::try_from(size).unwrap_or(usize::MAX).min(bytes.len());
    bytes.get(..size).unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes of a stretch, `None` for those that are not known.
    fn bytes(stretch: Stretch<'_>) -> Vec<Option<u8>> {
        stretch
            .parts()
            .flat_map(|part| match part {
                Part::Known(bytes) => bytes.iter().copied().map(Some).collect(),
                Part::Gap(gap) => vec![None; usize::try_from(gap).unwrap()],
            })
            .collect()
    }

    proptest! {
        #[test]
        fn a_split_loses_nothing(
            head in prop::collection::vec(any::<u8>(), 0..20), tail in prop::collection::vec(any::<u8>(), 0..20),
            size in 0_u64..60, at in 0_u64..70,
        ) {
            let stretch = Stretch::new(size, &head, &tail);
            prop_assert_eq!(stretch.len(), size);
            let (left, right) = stretch.split(at);
            prop_assert_eq!(left.len(), at.min(size));
            let joined: Vec<_> = bytes(left).into_iter().chain(bytes(right)).collect();
            prop_assert_eq!(joined, bytes(stretch));
        }
    }
}
