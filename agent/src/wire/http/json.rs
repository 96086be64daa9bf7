//! Values in a JSON text of which perhaps only the ends are known.
//!
//! The head is read as JSON. The tail may begin anywhere: it is read once as if a string were open there and once as
//! if none were, and counts only where one of both makes JSON that ends as an object does.

use super::ends::Known;

/// Values that are kept of a text.
const MAX_FIELDS: usize = 512;

/// Deepest nesting.
const MAX_DEPTH: i32 = 64;

/// A value that has a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Field<'a> {
    /// 1 for keys of the outermost object.
    pub(super) depth: i32,
    pub(super) key: &'a [u8],
    pub(super) value: Value<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Number(f64),
    Bool(bool),
    Null,
    /// A string as it is written, without its quotes.
    Text(&'a [u8]),
    /// A string whose middle is missing.
    LongText {
        start: &'a [u8],
        end: &'a [u8],
        /// Bytes of all of it.
        len: u64,
    },
    /// An array or object.
    Nested,
}

impl Value<'_> {
    pub(super) fn number(self) -> Option<f64> {
        match self {
            Self::Number(number) => Some(number),
            _ => None,
        }
    }

    /// A whole number that is not negative.
    pub(super) fn count(self) -> Option<u32> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be whole and within u32"
        )]
        self.number()
            .filter(|number| number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(number))
            .map(|number| number as u32)
    }
}

/// The values of a text.
#[derive(Debug, Default)]
pub(super) struct Fields<'a>(Vec<Field<'a>>);

impl<'a> Fields<'a> {
    pub(super) fn of(known: &'a Known<'_>) -> Self {
        let mut head = Scan::new(&known.head);
        let is_json = head.run();
        let Some(tail) = known.tail else {
            return Self(head.fields);
        };
        if !is_json {
            return Self(Vec::new());
        }
        let mut fields = head.fields;
        let (inside, outside) = (Scan::resumed(tail, true), Scan::resumed(tail, false));
        let ((Some(scan), None) | (None, Some(scan))) = (inside, outside) else {
            return Self(fields);
        };
        // The string that is open where the head ends is the one that ends in the tail.
        if let (Some((key, depth, from)), Some(end)) = (head.open, scan.resumed_to) {
            let tail_from = known.len - tail.len() as u64;
            fields.push(Field {
                depth,
                key,
                value: Value::LongText {
                    start: known.head.get(from..).unwrap_or_default(),
                    end: tail.get(..end).unwrap_or_default(),
                    len: tail_from + end as u64 - from as u64,
                },
            });
        }
        // The text ends at depth 0.
        let shift = -scan.depth;
        fields.extend(scan.fields.into_iter().map(|field| Field {
            depth: field.depth + shift,
            ..field
        }));
        Self(fields)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Field<'a>> {
        self.0.iter()
    }

    /// The value of a key of the outermost object.
    pub(super) fn top(&self, key: &[u8]) -> Option<Value<'a>> {
        self.iter()
            .rfind_field(|field| field.depth == 1 && field.key == key)
    }

    /// The last value of a key at any depth.
    pub(super) fn any(&self, key: &[u8]) -> Option<Value<'a>> {
        self.iter().rfind_field(|field| field.key == key)
    }
}

/// Later values of a key replace earlier ones, as in Python's `json`.
trait LastField<'a> {
    fn rfind_field(self, is_it: impl Fn(&Field<'a>) -> bool) -> Option<Value<'a>>;
}

impl<'f, 'a: 'f, I: Iterator<Item = &'f Field<'a>>> LastField<'a> for I {
    fn rfind_field(self, is_it: impl Fn(&Field<'a>) -> bool) -> Option<Value<'a>> {
        self.filter(|field| is_it(field)).last().map(|field| field.value)
    }
}

struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
    depth: i32,
    fields: Vec<Field<'a>>,
    key: Option<&'a [u8]>,
    /// The string that was open at the end: its key, depth and first byte.
    open: Option<(&'a [u8], i32, usize)>,
    /// Where the string ended that was open at the start.
    resumed_to: Option<usize>,
}

impl<'a> Scan<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            depth: 0,
            fields: Vec::new(),
            key: None,
            open: None,
            resumed_to: None,
        }
    }

    /// Reads a tail. `None`: it can't be read so.
    fn resumed(bytes: &'a [u8], in_string: bool) -> Option<Self> {
        let mut scan = Self::new(bytes);
        if in_string {
            // A quote at the start could be an escaped one: what follows would then hardly be JSON.
            let end = string_end(bytes, 0)?;
            scan.at = end + 1;
            scan.resumed_to = Some(end);
        } else {
            // The rest of a number or word.
            let word = bytes.iter().take_while(|byte| is_word(**byte)).count();
            scan.at = word;
        }
        let ends = scan.run() && scan.open.is_none();
        let last = bytes.iter().rfind(|byte| !byte.is_ascii_whitespace());
        (ends && last == Some(&b'}')).then_some(scan)
    }

    /// `false`: this is not JSON.
    fn run(&mut self) -> bool {
        while let Some(&byte) = self.bytes.get(self.at) {
            match byte {
                b' ' | b'\t' | b'\r' | b'\n' | b',' => self.at += 1,
                // Only behind a key, which takes it.
                b':' => {
                    if self.at > 0 && self.resumed_to.is_none_or(|end| end + 1 != self.at) {
                        return false;
                    }
                    self.at += 1;
                }
                b'{' | b'[' => {
                    self.push(Value::Nested);
                    self.depth += 1;
                    if self.depth > MAX_DEPTH {
                        return false;
                    }
                    self.at += 1;
                }
                b'}' | b']' => {
                    self.key = None;
                    self.depth -= 1;
                    if self.depth < -MAX_DEPTH {
                        return false;
                    }
                    self.at += 1;
                }
                b'"' => {
                    let from = self.at + 1;
                    let Some(end) = string_end(self.bytes, from) else {
                        self.open = self.key.map(|key| (key, self.depth, from));
                        if self.open.is_none() {
                            self.open = Some((&[], self.depth, from));
                        }
                        return true;
                    };
                    let text = self.bytes.get(from..end).unwrap_or_default();
                    self.at = end + 1;
                    let colon = self
                        .bytes
                        .get(self.at..)
                        .unwrap_or_default()
                        .iter()
                        .position(|byte| !byte.is_ascii_whitespace());
                    match colon {
                        Some(colon)
                            if self.key.is_none() && self.bytes.get(self.at + colon) == Some(&b':') =>
                        {
                            self.key = Some(text);
                            self.at += colon + 1;
                        }
                        _ => self.push(Value::Text(text)),
                    }
                }
                byte if is_word(byte) => {
                    let rest = self.bytes.get(self.at..).unwrap_or_default();
                    let len = rest.iter().take_while(|byte| is_word(**byte)).count();
                    let word = rest.get(..len).unwrap_or_default();
                    self.at += len;
                    let is_cut = self.at == self.bytes.len();
                    match word {
                        b"true" => self.push(Value::Bool(true)),
                        b"false" => self.push(Value::Bool(false)),
                        b"null" | b"NaN" | b"Infinity" | b"-Infinity" => self.push(Value::Null),
                        // The last word of a head may go on.
                        _ if is_cut => return true,
                        word => match str::from_utf8(word).ok().and_then(|word| word.parse().ok()) {
                            Some(number) => self.push(Value::Number(number)),
                            None => return false,
                        },
                    }
                }
                _ => return false,
            }
        }
        true
    }

    fn push(&mut self, value: Value<'a>) {
        if let Some(key) = self.key.take()
            && self.fields.len() < MAX_FIELDS
        {
            self.fields.push(Field {
                depth: self.depth,
                key,
                value,
            });
        }
    }
}

/// The quote that ends a string whose bytes begin at `from`.
pub(super) fn string_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    loop {
        match bytes.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use rstest::rstest;

    use super::*;

    fn known<'a>(head: &'a [u8], tail: Option<&'a [u8]>, len: u64) -> Known<'a> {
        Known {
            head: Cow::Borrowed(head),
            tail,
            len,
        }
    }

    #[test]
    fn a_whole_text() {
        let text = br#"{"a": 1.5, "b": {"a": "x\"y", "c": [1, {"d": null}]}, "stream": true, "n": 3}"#;
        let known = known(text, None, text.len() as u64);
        let fields = Fields::of(&known);
        assert_eq!(fields.top(b"a"), Some(Value::Number(1.5)));
        assert_eq!(fields.any(b"a"), Some(Value::Text(br#"x\"y"#)));
        assert_eq!(fields.any(b"d"), Some(Value::Null));
        assert_eq!(fields.top(b"stream"), Some(Value::Bool(true)));
        assert_eq!(fields.top(b"n").and_then(Value::count), Some(3));
        assert_eq!(fields.top(b"c"), None);
    }

    #[rstest]
    #[case::in_a_string(br#"{"input":"lo"#, br#"ng","stream":true}"#, Some(Value::Bool(true)))]
    #[case::between(br#"{"a":[1,2"#, br#"],"stream":true}"#, Some(Value::Bool(true)))]
    #[case::in_a_number(br#"{"a":12"#, br#"34,"stream":true}"#, Some(Value::Bool(true)))]
    #[case::at_its_end(br#"{"input":"a"#, br#"","stream":true}"#, Some(Value::Bool(true)))]
    #[case::in_an_escape(br#"{"input":"a"#, br#"" b","stream":true}"#, Some(Value::Bool(true)))]
    #[case::nested(br#"{"input":"a"#, br#"b","x":{"stream":true}}"#, None)]
    #[case::text_that_looks_like_it(br#"{"input":"a"#, br#" \"stream\":true,","b":1}"#, None)]
    #[case::not_the_end(br#"{"input":"a"#, br#"b","stream":true,"c":"d"#, None)]
    #[case::no_json(b"name=x", br#"","stream":true}"#, None)]
    fn a_tail(#[case] head: &[u8], #[case] tail: &[u8], #[case] stream: Option<Value<'_>>) {
        let known = known(head, Some(tail), 10_000);
        assert_eq!(Fields::of(&known).top(b"stream"), stream);
    }

    #[test]
    fn the_length_of_a_string_without_its_middle() {
        let (head, tail) = (br#"{"audio":"AAAA"#, br#"BB==","response_format":"pcm"}"#);
        let known = known(head, Some(tail), 1000);
        let value = Fields::of(&known).top(b"audio");
        let expected = Value::LongText {
            start: b"AAAA",
            end: b"BB==",
            len: 1000 - 10 - (tail.len() as u64 - 4),
        };
        assert_eq!(value, Some(expected));
    }
}
