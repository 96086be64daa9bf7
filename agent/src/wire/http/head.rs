//! Start lines and headers of requests and answers, as far as they matter.

use super::{
    body::Body,
    note::Endpoint,
    stretch::{Part, Stretch},
};

/// Longest head that is kept; uvicorn's own limit is 64 KiB.
const MAX_HEAD: usize = 16 << 10;

/// Headers that are looked at.
const MAX_HEADERS: usize = 96;

/// Longest request id that is taken from a header or an answer.
pub(super) const MAX_ID: usize = 128;

/// Collects a head.
#[derive(Clone, Debug, Default)]
pub(super) struct HeadBuffer(Vec<u8>);

/// What became of the bytes given to a [`HeadBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collected<'a> {
    /// The head is complete; this follows it.
    Whole(Stretch<'a>),
    /// It goes on.
    More,
    /// It goes on in bytes that are not known; what follows them.
    Cut(Stretch<'a>),
    /// It is longer than any that is kept.
    TooLong,
}

impl<'a> Collected<'a> {
    /// What follows the bytes that were taken.
    pub(super) fn rest(self) -> Stretch<'a> {
        match self {
            Self::Whole(rest) | Self::Cut(rest) => rest,
            Self::More | Self::TooLong => Stretch::default(),
        }
    }
}

impl HeadBuffer {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn take<'a>(&mut self, input: Stretch<'a>) -> Collected<'a> {
        let mut passed = 0;
        for part in input.parts() {
            let Part::Known(bytes) = part else {
                return Collected::Cut(input.split(passed).1);
            };
            // The end may lie across the old bytes and the new ones.
            let from = self.0.len().saturating_sub(3);
            let room = MAX_HEAD - self.0.len();
            let old = self.0.len();
            self.0
                .extend_from_slice(bytes.get(..room.min(bytes.len())).unwrap_or_default());
            let end = self
                .0
                .get(from..)
                .and_then(|fresh| fresh.windows(4).position(|window| window == b"\r\n\r\n"));
            if let Some(end) = end {
                self.0.truncate(from + end + 4);
                let used = (self.0.len() - old) as u64;
                return Collected::Whole(input.split(passed + used).1);
            }
            if self.0.len() >= MAX_HEAD {
                return Collected::TooLong;
            }
            passed += bytes.len() as u64;
        }
        Collected::More
    }

    /// The complete lines of a head that was cut, ended as a head is.
    fn cut_lines(&self) -> Option<Vec<u8>> {
        let end = self.0.windows(2).rposition(|window| window == b"\r\n")?;
        let mut lines = self.0.get(..end + 2)?.to_vec();
        lines.extend_from_slice(b"\r\n");
        Some(lines)
    }
}

/// What the start of a stream of bytes looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    Request,
    Http2,
    /// A TLS record: the plaintext does not pass here.
    Tls,
    Other,
}

impl Opening {
    pub(super) fn of(bytes: &[u8]) -> Self {
        const METHODS: [&[u8]; 8] = [
            b"GET ",
            b"POST ",
            b"HEAD ",
            b"PUT ",
            b"DELETE ",
            b"OPTIONS ",
            b"PATCH ",
            b"CONNECT ",
        ];
        // Leniency of llhttp: empty lines between requests.
        let start = bytes
            .iter()
            .position(|byte| !matches!(byte, b'\r' | b'\n'))
            .unwrap_or(0);
        let bytes = bytes.get(start..).unwrap_or_default();
        let is = |word: &[u8]| !bytes.is_empty() && (bytes.starts_with(word) || word.starts_with(bytes));
        if METHODS.into_iter().any(is) {
            Self::Request
        } else if is(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") {
            Self::Http2
        } else if bytes.starts_with(&[0x16, 0x03]) {
            Self::Tls
        } else {
            Self::Other
        }
    }

    /// Whether bytes surely begin with a request: a method and a target. An empty line may end what was before it.
    pub(super) fn is_request(bytes: &[u8]) -> bool {
        bytes.first().is_some_and(u8::is_ascii_uppercase)
            && Self::of(bytes) == Self::Request
            && bytes
                .split(|byte| *byte == b' ')
                .nth(1)
                .is_some_and(|target| target.starts_with(b"/") || target.starts_with(b"http"))
    }
}

/// Whether bytes begin with the start line of an answer.
pub(super) fn is_answer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"HTTP/1.")
        && bytes
            .get(8..12)
            .is_some_and(|rest| rest.starts_with(b" ") && rest.iter().skip(1).all(u8::is_ascii_digit))
}

/// How a request's body is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    #[default]
    Json,
    Multipart,
}

/// A request's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestHead {
    pub(super) endpoint: Endpoint,
    pub(super) body: Body,
    pub(super) form: Form,
    pub(super) is_head: bool,
    pub(super) upgrades: bool,
    /// The id that the client asks for.
    pub(super) id: Option<Box<str>>,
}

/// A head that is no HTTP/1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoHead;

impl RequestHead {
    /// Reads a complete head.
    pub(super) fn read(buffer: &HeadBuffer) -> Result<Self, NoHead> {
        Self::parse(buffer.bytes())
    }

    /// Reads the whole lines of a head that was cut. Where its body ends is not known.
    pub(super) fn read_cut(buffer: &HeadBuffer) -> Result<Self, NoHead> {
        let lines = buffer.cut_lines().ok_or(NoHead)?;
        Ok(Self {
            body: Body::UntilClose,
            ..Self::parse(&lines)?
        })
    }

    fn parse(bytes: &[u8]) -> Result<Self, NoHead> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) | Err(_) => return Err(NoHead),
        }
        let (method, target) = (
            request.method.unwrap_or_default(),
            request.path.unwrap_or_default(),
        );
        let mut framing = Framing::default();
        let mut head = Self {
            endpoint: Endpoint::of(method, target),
            body: Body::Done,
            form: Form::Json,
            is_head: method == "HEAD",
            upgrades: false,
            id: None,
        };
        for header in request.headers.iter() {
            framing.header(header);
            match lower(header.name).as_slice() {
                b"content-type" if contains(header.value, b"multipart/form-data") => {
                    head.form = Form::Multipart;
                }
                b"upgrade" if contains(header.value, b"websocket") => head.upgrades = true,
                b"x-request-id" => head.id = id(header.value),
                _ => {}
            }
        }
        head.body = match framing {
            Framing { chunked: true, .. } => Body::chunked(),
            Framing { length, .. } => Body::Length(length.unwrap_or(0)),
        };
        Ok(head)
    }
}

/// What an answer's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Media {
    Json,
    Events,
    Pcm,
    Wav,
    /// An image file, or an archive of some.
    Images,
    Other,
}

/// An answer's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AnswerHead {
    pub(super) status: u16,
    pub(super) body: Body,
    pub(super) media: Media,
    /// It is written as it comes into being: in chunks.
    pub(super) streams: bool,
    /// The body has a content coding, which is not undone.
    pub(super) is_coded: bool,
    /// WebSocket messages are compressed.
    pub(super) is_deflated: bool,
}

impl AnswerHead {
    /// Reads a complete head; `to_head`: it answers a HEAD request.
    pub(super) fn read(buffer: &HeadBuffer, to_head: bool) -> Result<Self, NoHead> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut answer = httparse::Response::new(&mut headers);
        match answer.parse(buffer.bytes()) {
            Ok(httparse::Status::Complete(_)) => {}
            Ok(httparse::Status::Partial) | Err(_) => return Err(NoHead),
        }
        let status = answer.code.ok_or(NoHead)?;
        let mut framing = Framing::default();
        let mut head = Self {
            status,
            body: Body::Done,
            media: Media::Other,
            streams: false,
            is_coded: false,
            is_deflated: false,
        };
        for header in answer.headers.iter() {
            framing.header(header);
            match lower(header.name).as_slice() {
                b"content-type" => {
                    let value = lower_value(header.value);
                    head.media = match value.as_slice() {
                        value if value.starts_with(b"application/json") => Media::Json,
                        value if value.starts_with(b"text/event-stream") => Media::Events,
                        value if value.starts_with(b"audio/pcm") => Media::Pcm,
                        value if value.starts_with(b"audio/wav") => Media::Wav,
                        value if value.starts_with(b"image/") => Media::Images,
                        value if value.starts_with(b"application/zip") => Media::Images,
                        _ => Media::Other,
                    };
                }
                b"content-encoding" => head.is_coded = !header.value.eq_ignore_ascii_case(b"identity"),
                b"sec-websocket-extensions" => {
                    head.is_deflated = contains(header.value, b"permessage-deflate");
                }
                _ => {}
            }
        }
        head.streams = framing.chunked;
        let has_no_body = to_head || matches!(status, 100..=199 | 204 | 304);
        head.body = match framing {
            _ if has_no_body => Body::Done,
            Framing { chunked: true, .. } => Body::chunked(),
            Framing {
                length: Some(length), ..
            } => Body::Length(length),
            Framing { .. } => Body::UntilClose,
        };
        Ok(head)
    }
}

/// What the headers say of a body's length. Chunks count more than a length (RFC 9112, 6.3).
#[derive(Clone, Copy, Debug, Default)]
struct Framing {
    chunked: bool,
    length: Option<u64>,
}

impl Framing {
    fn header(&mut self, header: &httparse::Header<'_>) {
        if header.name.eq_ignore_ascii_case("transfer-encoding") {
            self.chunked |= contains(header.value, b"chunked");
        } else if header.name.eq_ignore_ascii_case("content-length") {
            let text = str::from_utf8(header.value).unwrap_or_default();
            self.length = text.trim().parse().ok();
        }
    }
}

fn lower(name: &str) -> Vec<u8> {
    name.as_bytes().to_ascii_lowercase()
}

fn lower_value(value: &[u8]) -> Vec<u8> {
    value.trim_ascii().to_ascii_lowercase()
}

fn contains(value: &[u8], word: &[u8]) -> bool {
    value
        .windows(word.len())
        .any(|window| window.eq_ignore_ascii_case(word))
}

/// A request id out of untrusted bytes.
pub(super) fn id(bytes: &[u8]) -> Option<Box<str>> {
    let text = str::from_utf8(bytes).ok()?.trim();
    let fits = !text.is_empty() && text.len() <= MAX_ID && !text.chars().any(char::is_control);
    fits.then(|| text.into())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn buffer(text: &[u8]) -> HeadBuffer {
        let mut buffer = HeadBuffer::default();
        buffer.take(Stretch::known(text));
        buffer
    }

    #[rstest]
    #[case::none(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", Body::Length(0))]
    #[case::length(
        b"POST /v1/audio/speech HTTP/1.1\r\nContent-Length: 12\r\n\r\n",
        Body::Length(12)
    )]
    #[case::chunked(
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: Chunked\r\ncontent-length: 3\r\n\r\n",
        Body::chunked()
    )]
    fn bodies_of_requests(#[case] text: &[u8], #[case] body: Body) {
        assert_eq!(RequestHead::read(&buffer(text)).unwrap().body, body);
    }

    #[rstest]
    #[case::length(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", false, Body::Length(5))]
    #[case::head(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", true, Body::Done)]
    #[case::no_content(b"HTTP/1.1 204 No Content\r\n\r\n", false, Body::Done)]
    #[case::until_close(b"HTTP/1.0 200 OK\r\n\r\n", false, Body::UntilClose)]
    fn bodies_of_answers(#[case] text: &[u8], #[case] to_head: bool, #[case] body: Body) {
        assert_eq!(AnswerHead::read(&buffer(text), to_head).unwrap().body, body);
    }

    #[test]
    fn a_head_ends_across_pieces() {
        let mut buffer = HeadBuffer::default();
        assert_eq!(
            buffer.take(Stretch::known(b"GET / HTTP/1.1\r\nhost: x\r\n\r")),
            Collected::More
        );
        let Collected::Whole(rest) = buffer.take(Stretch::known(b"\nrest")) else {
            panic!("no end")
        };
        assert_eq!(rest.start(), b"rest");
        assert!(RequestHead::read(&buffer).is_ok());
    }

    #[test]
    fn the_whole_lines_of_a_cut_head_are_read() {
        let text = b"POST /v1/audio/speech HTTP/1.1\r\nx-request-id: a\r\ncookie: lo";
        let mut buffer = HeadBuffer::default();
        let cut = buffer.take(Stretch::new(5000, text, b"{}"));
        assert!(matches!(cut, Collected::Cut(_)));
        let head = RequestHead::read_cut(&buffer).unwrap();
        assert_eq!(
            (head.endpoint, head.id.as_deref(), head.body),
            (Endpoint::Speech, Some("a"), Body::UntilClose)
        );
    }

    #[rstest]
    #[case::request(b"POST /x HTTP/1.1", Opening::Request)]
    #[case::part_of_a_method(b"PO", Opening::Request)]
    #[case::empty_line_before(b"\r\nGET / HTTP/1.1", Opening::Request)]
    #[case::http2(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Opening::Http2)]
    #[case::tls(b"\x16\x03\x01\x02", Opening::Tls)]
    #[case::other(b"\x00\x01", Opening::Other)]
    #[case::nothing(b"", Opening::Other)]
    fn openings(#[case] bytes: &[u8], #[case] opening: Opening) {
        assert_eq!(Opening::of(bytes), opening);
    }
}
