//! Where a message's body ends: by length, by chunks, or with the connection.

use super::stretch::Stretch;

/// Longest line in front of a chunk: 16 hex digits and some extension.
const MAX_CHUNK_LINE: usize = 256;

/// Longest line behind the last chunk.
const MAX_TRAILER_LINE: usize = 8192;

/// How far a body has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// So many bytes are to come.
    Length(u64),
    Chunked(Chunk),
    /// All that comes until the connection ends.
    UntilClose,
    /// It has ended.
    Done,
}

/// Where in a chunked body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// In the line with the size.
    Size(Vec<u8>),
    /// So many bytes are to come.
    Data(u64),
    /// Behind the data: so many bytes of the line's end have passed.
    DataEnd(usize),
    /// In a line behind the last chunk.
    Trailer(Vec<u8>),
}

/// What the next bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    /// Content.
    Data(Stretch<'a>),
    /// A chunk is complete.
    ChunkEnd,
    /// The body is complete.
    End,
    /// All bytes are used up.
    More,
    /// This is not how the body goes on: bytes before it were lost.
    Broken,
}

impl Step<'_> {
    /// Where the content begins in what a step took off `before`, leaving `after`: the lines in front of a chunk go
    /// with it.
    pub(super) fn data_of<'a>(self, before: Stretch<'a>, after: Stretch<'a>) -> Stretch<'a> {
        let Self::Data(data) = self else {
            return after;
        };
        let taken = before.len() - after.len();
        before.split(taken - data.len()).1
    }
}

impl Body {
    pub(super) fn chunked() -> Self {
        Self::Chunked(Chunk::Size(Vec::new()))
    }

    /// Whether it stands between two chunks, or has had nothing yet: nothing is half said.
    pub(super) fn is_between_chunks(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(Chunk::Size(line)) => line.is_empty(),
            Self::Chunked(Chunk::Trailer(_)) | Self::Done => true,
            Self::Chunked(Chunk::Data(_) | Chunk::DataEnd(_)) | Self::UntilClose => false,
        }
    }

    /// Takes the next bytes off `input`. To be called until it gives [`Step::End`], [`Step::More`] or
    /// [`Step::Broken`].
    pub(super) fn step<'a>(&mut self, input: &mut Stretch<'a>) -> Step<'a> {
        match self {
            Self::Done | Self::Length(0) => {
                *self = Self::Done;
                Step::End
            }
            _ if input.is_empty() => Step::More,
            Self::Length(left) => {
                let (data, rest) = input.split(*left);
                *left -= data.len();
                *input = rest;
                Step::Data(data)
            }
            Self::UntilClose => Step::Data(std::mem::take(input)),
            Self::Chunked(chunk) => {
                let step = chunk.step(input);
                if step == Step::End {
                    *self = Self::Done;
                }
                step
            }
        }
    }
}

impl Chunk {
    fn step<'a>(&mut self, input: &mut Stretch<'a>) -> Step<'a> {
        loop {
            match self {
                Self::Size(line) => match take_line(line, MAX_CHUNK_LINE, input) {
                    Line::More => return Step::More,
                    Line::Broken => return Step::Broken,
                    Line::Whole => match chunk_size(line) {
                        Some(0) => *self = Self::Trailer(Vec::new()),
                        Some(size) => *self = Self::Data(size),
                        None => return Step::Broken,
                    },
                },
                Self::Data(0) => {
                    *self = Self::DataEnd(0);
                    return Step::ChunkEnd;
                }
                Self::Data(left) => {
                    if input.is_empty() {
                        return Step::More;
                    }
                    let (data, rest) = input.split(*left);
                    *left -= data.len();
                    *input = rest;
                    return Step::Data(data);
                }
                Self::DataEnd(2) => *self = Self::Size(Vec::new()),
                Self::DataEnd(passed) => match (input.start().first(), b"\r\n".get(*passed)) {
                    (Some(byte), Some(wanted)) if byte == wanted => {
                        *passed += 1;
                        *input = input.split(1).1;
                    }
                    _ if input.is_empty() => return Step::More,
                    _ => return Step::Broken,
                },
                Self::Trailer(line) => match take_line(line, MAX_TRAILER_LINE, input) {
                    Line::More => return Step::More,
                    Line::Broken => return Step::Broken,
                    Line::Whole if line.is_empty() => return Step::End,
                    Line::Whole => line.clear(),
                },
            }
        }
    }
}

enum Line {
    /// It is in the buffer, without its end.
    Whole,
    More,
    /// Too long, or not all of it is known.
    Broken,
}

fn take_line(line: &mut Vec<u8>, max: usize, input: &mut Stretch<'_>) -> Line {
    while !input.is_empty() {
        let bytes = input.start();
        if bytes.is_empty() {
            return Line::Broken;
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let taken = end.map_or(bytes.len(), |end| end + 1);
        if line.len() + taken > max {
            return Line::Broken;
        }
        line.extend_from_slice(bytes.get(..taken).unwrap_or_default());
        *input = input.split(taken as u64).1;
        if end.is_some() {
            line.pop();
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            return Line::Whole;
        }
    }
    Line::More
}

/// The size in a chunk's line: hex digits, then nothing or an extension.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line
        .iter()
        .position(|byte| matches!(byte, b';' | b' ' | b'\t'))
        .and_then(|end| line.get(..end))
        .unwrap_or(line);
    if digits.is_empty() || digits.len() > 15 {
        return None;
    }
    digits.iter().try_fold(0_u64, |size, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(size << 4 | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::plain(b"1f", Some(31))]
    #[case::upper(b"1F", Some(31))]
    #[case::extension(b"a;x=1", Some(10))]
    #[case::spaces(b"a  ", Some(10))]
    #[case::last(b"0", Some(0))]
    #[case::empty(b"", None)]
    #[case::sign(b"+1", None)]
    #[case::too_long(b"1000000000000000", None)]
    fn sizes_of_chunks(#[case] line: &[u8], #[case] size: Option<u64>) {
        assert_eq!(chunk_size(line), size);
    }

    fn read(mut body: Body, mut input: Stretch<'_>) -> (u64, u32, Step<'_>) {
        let (mut bytes, mut chunks) = (0, 0);
        loop {
            match body.step(&mut input) {
                Step::Data(data) => bytes += data.len(),
                Step::ChunkEnd => chunks += 1,
                end => return (bytes, chunks, end),
            }
        }
    }

    #[rstest]
    #[case::two_chunks(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", (5, 2, Step::End))]
    #[case::trailers(b"1\r\na\r\n0\r\nx: y\r\n\r\n", (1, 1, Step::End))]
    #[case::bare_newlines(b"1\na\r\n0\n\n", (1, 1, Step::End))]
    #[case::not_over(b"3\r\nab", (2, 0, Step::More))]
    #[case::no_size(b"x\r\n", (0, 0, Step::Broken))]
    #[case::no_end_of_data(b"1\r\nabc", (1, 1, Step::Broken))]
    fn chunked_bodies(#[case] input: &[u8], #[case] expected: (u64, u32, Step<'_>)) {
        assert_eq!(read(Body::chunked(), Stretch::known(input)), expected);
    }

    #[test]
    fn a_gap_in_data_is_counted_and_one_in_a_line_is_a_break() {
        let input = Stretch::new(4 + 100 + 2 + 5, b"64\r\n", b"ab\r\n0\r\n\r\n");
        assert_eq!(read(Body::chunked(), input), (100, 1, Step::End));
        let input = Stretch::new(40, b"6", b"\r\n");
        assert_eq!(read(Body::chunked(), input).2, Step::Broken);
    }
}
