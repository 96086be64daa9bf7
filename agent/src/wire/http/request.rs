//! What a request's body asks for.

use super::{
    ends::{Ends, Known},
    head::Form,
    json::{Fields, Value},
    note::{Ask, Endpoint},
};

/// Bytes that are kept of a body's ends: parameters stand before or behind the text, as the client likes.
const MAX_FIRST: usize = 2048;
const MAX_LAST: usize = 1024;

/// Largest side of an image that is believed, in pixels.
const MAX_SIDE: u32 = 1 << 16;

pub(super) fn buffer() -> Ends {
    Ends::new(MAX_FIRST, MAX_LAST)
}

/// Reads a body, or what is known of it.
pub(super) fn ask(endpoint: Endpoint, form: Form, body: &Ends) -> Ask {
    let known = body.known();
    match form {
        Form::Json => of_json(endpoint, &known),
        Form::Multipart => of_form(&known),
    }
}

fn of_json(endpoint: Endpoint, known: &Known<'_>) -> Ask {
    let fields = Fields::of(known);
    // Chat has parameters of images in `extra_body` as well, and `n` means answers.
    let is_chat = endpoint == Endpoint::Chat;
    let find = |key: &[u8]| {
        fields.top(key).or_else(|| {
            let nested = || fields.iter().filter(|field| field.depth == 2 && field.key == key);
            is_chat.then(nested)?.last().map(|field| field.value)
        })
    };
    let images = if is_chat {
        find(b"num_outputs_per_prompt")
    } else {
        find(b"n")
    };
    Ask {
        sample_rate: find(b"sample_rate")
            .and_then(Value::count)
            .filter(|rate| *rate > 0),
        images: images.and_then(Value::count),
        steps: find(b"num_inference_steps").and_then(Value::count),
        size: find(b"size").and_then(|value| match value {
            Value::Text(text) => size(text),
            _ => None,
        }),
    }
}

/// A form: the fields stand in parts of their own, images among them.
fn of_form(known: &Known<'_>) -> Ask {
    let find = |name: &str| {
        let before = format!("name=\"{name}\"\r\n\r\n");
        let value_in = |bytes: &'_ [u8]| {
            let at = bytes
                .windows(before.len())
                .rposition(|window| window == before.as_bytes())?;
            let rest = bytes.get(at + before.len()..)?;
            let end = rest.windows(2).position(|window| window == b"\r\n")?;
            Some(rest.get(..end)?.to_vec())
        };
        known.tail.and_then(value_in).or_else(|| value_in(&known.head))
    };
    let count = |name| str::from_utf8(&find(name)?).ok()?.trim().parse().ok();
    Ask {
        sample_rate: None,
        images: count("n"),
        steps: count("num_inference_steps"),
        size: find("size").and_then(|text| size(&text)),
    }
}

/// `1024x768` as width and height.
pub(super) fn size(text: &[u8]) -> Option<(u32, u32)> {
    let (width, height) = str::from_utf8(text).ok()?.split_once(['x', 'X'])?;
    let side = |side: &str| {
        side.trim()
            .parse()
            .ok()
            .filter(|side| (1..=MAX_SIDE).contains(side))
    };
    Some((side(width)?, side(height)?))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::wire::http::stretch::Stretch;

    fn asked(endpoint: Endpoint, form: Form, text: &str) -> Ask {
        let mut body = buffer();
        body.push(Stretch::known(text.as_bytes()));
        ask(endpoint, form, &body)
    }

    #[rstest]
    #[case::speech(
        Endpoint::Speech,
        r#"{"input":"say \"sample_rate\": 1","stream_format":"audio","sample_rate":8000}"#,
        Ask { sample_rate: Some(8000), ..Ask::default() }
    )]
    #[case::image(
        Endpoint::Images,
        r#"{"prompt":"x","n":2,"size":"512x256","num_inference_steps":20}"#,
        Ask { images: Some(2), steps: Some(20), size: Some((512, 256)), sample_rate: None }
    )]
    #[case::chat(
        Endpoint::Chat,
        r#"{"n":3,"messages":[{"role":"user","content":"x"}],"extra_body":{"num_inference_steps":4}}"#,
        Ask { steps: Some(4), ..Ask::default() }
    )]
    #[case::nothing_believable(
        Endpoint::Images,
        r#"{"n":1.5,"size":"0x7","num_inference_steps":-1}"#,
        Ask::default()
    )]
    #[case::no_json(Endpoint::Images, "what", Ask::default())]
    fn json(#[case] endpoint: Endpoint, #[case] text: &str, #[case] ask: Ask) {
        assert_eq!(asked(endpoint, Form::Json, text), ask);
    }

    #[test]
    fn a_form() {
        let text = "--b\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nn\r\n--b\r\nContent-Disposition: \
                    form-data; name=\"n\"\r\n\r\n2\r\n--b\r\nContent-Disposition: form-data; \
                    name=\"num_inference_steps\"\r\n\r\n12\r\n--b--\r\n";
        let ask = asked(Endpoint::ImageEdits, Form::Multipart, text);
        assert_eq!((ask.images, ask.steps, ask.size), (Some(2), Some(12), None));
    }
}
