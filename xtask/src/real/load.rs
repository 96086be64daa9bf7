//! The requests that a run sends: each kind, alone and four at once, some given up by the client midway.

use std::{
    io::{BufRead, BufReader, Read},
    net::TcpStream,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use tungstenite::Message;

use super::kit::Kind;

/// Requests in flight in the concurrent part.
pub(crate) const CONCURRENT: usize = 4;
/// Longer than any request may take on a slow machine.
const LIMIT: Duration = Duration::from_mins(2);
/// s16le, one channel.
const BYTES_A_FRAME: usize = 2;
const WAV_HEADER: usize = 44;

/// A request and how its client behaves.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) form: Form,
    body: Value,
    leave: Option<Leave>,
}

/// What kind of answer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum Form {
    Completion,
    CompletionStream,
    Chat,
    ChatStream,
    /// A whole WAV file.
    Speech,
    /// Raw samples as they are made.
    SpeechStream,
    /// Samples in server-sent events.
    SpeechEvents,
    /// Samples as they are made, over a WebSocket.
    SpeechSocket,
    /// Pictures in a JSON answer.
    Images,
}

impl Form {
    fn path(self) -> &'static str {
        match self {
            Self::Completion | Self::CompletionStream => "/v1/completions",
            Self::Chat | Self::ChatStream => "/v1/chat/completions",
            Self::Speech | Self::SpeechStream | Self::SpeechEvents => "/v1/audio/speech",
            Self::SpeechSocket => "/v1/audio/speech/stream",
            Self::Images => "/v1/images/generations",
        }
    }

    pub(crate) fn streams(self) -> bool {
        !matches!(self, Self::Completion | Self::Chat | Self::Speech | Self::Images)
    }
}

/// When the client hangs up.
#[derive(Clone, Copy, Debug)]
enum Leave {
    /// After so many packets of a stream.
    Packets(usize),
    /// While it waits for an answer.
    Time(Duration),
}

/// What the client saw of one request.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) form: Form,
    /// The client hung up.
    pub(crate) left: bool,
    /// From before the request was written to the end of the answer.
    pub(crate) seconds: f64,
    /// To the first packet of a stream.
    pub(crate) first_packet: Option<f64>,
    pub(crate) finish: Vec<String>,
    pub(crate) prompt_tokens: Option<u64>,
    /// Length of the text to speak; the tiny model has one token a byte.
    pub(crate) text: usize,
    pub(crate) output_tokens: Option<u64>,
    /// Audio frames received.
    pub(crate) frames: usize,
    /// Images received.
    pub(crate) images: usize,
}

/// `count` requests for a server, of every form it has; every sixth or so is given up.
pub(crate) fn requests(kind: Kind, count: usize) -> Vec<Request> {
    (0..count)
        .map(|i| match kind {
            Kind::Vllm { .. } => text_request(i),
            Kind::Omni { .. } => speech_request(i),
            Kind::Picture { .. } => picture_request(i),
        })
        .collect()
}

fn text_request(i: usize) -> Request {
    let prompt = format!("request {i} {}", "of some length ".repeat(i % 7));
    let mut body = json!({
        "model": "tiny",
        "max_tokens": 8 + 4 * (i % 10),
        "temperature": 1.0,
        "seed": i,
        "ignore_eos": !i.is_multiple_of(3),
    });
    let form = [
        Form::Completion,
        Form::CompletionStream,
        Form::ChatStream,
        Form::Chat,
    ]
    .get(i % 4)
    .copied()
    .unwrap_or(Form::Completion);
    if matches!(form, Form::Chat | Form::ChatStream) {
        body["messages"] = json!([{"role": "user", "content": prompt}]);
    } else {
        body["prompt"] = json!(prompt);
    }
    let mut leave = None;
    match i % 6 {
        // Two answers to one question are two engine requests.
        1 if i % 12 == 7 => body["n"] = json!(2),
        // The engine stops by itself ...
        2 => body["stop_token_ids"] = json!((100..200).collect::<Vec<_>>()),
        // ... or the API process finds a text and aborts the engine's request.
        3 => body["stop"] = json!(["a", "e", "0", "1"]),
        5 => {
            body["max_tokens"] = json!(150);
            body["ignore_eos"] = json!(true);
            leave = Some(if form.streams() {
                Leave::Packets(5)
            } else {
                Leave::Time(Duration::from_millis(150))
            });
        }
        _ => {}
    }
    if form.streams() {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    Request { form, body, leave }
}

fn speech_request(i: usize) -> Request {
    let form = [
        Form::Speech,
        Form::SpeechStream,
        Form::SpeechEvents,
        Form::SpeechSocket,
    ]
    .get(i % 4)
    .copied()
    .unwrap_or(Form::Speech);
    let mut body = json!({
        "model": "audex",
        "voice": "default",
        "input": format!("Sentence {:02} {}", i % 100, "goes on ".repeat(i % 4)),
        "response_format": if form == Form::Speech { "wav" } else { "pcm" },
    });
    match form {
        Form::SpeechStream => {
            body["stream"] = json!(true);
            body["stream_format"] = json!("audio");
        }
        Form::SpeechEvents => {
            body["stream"] = json!(true);
            body["stream_format"] = json!("sse");
        }
        Form::SpeechSocket => body["stream_audio"] = json!(true),
        _ => {}
    }
    let leave = (i % 7 == 5).then(|| {
        if form.streams() {
            Leave::Packets(2)
        } else {
            Leave::Time(Duration::from_millis(250))
        }
    });
    Request { form, body, leave }
}

fn picture_request(i: usize) -> Request {
    let mut body = json!({
        "model": "picture",
        "prompt": format!("Picture {:02} {}", i % 100, "with more in it ".repeat(i % 4)),
        "n": 1 + i % 2,
        "num_inference_steps": 2 + i % 5,
        "seed": i,
    });
    let mut leave = None;
    if i % 6 == 5 {
        // At the language model, or while a long picture is made.
        body["num_inference_steps"] = json!(80);
        leave = Some(Leave::Time(Duration::from_millis(if i % 12 == 5 {
            150
        } else {
            1500
        })));
    }
    Request {
        form: Form::Images,
        body,
        leave,
    }
}

/// The same speech request so many times, answered whole.
pub(crate) fn same_speech(count: usize) -> Vec<Request> {
    let body = json!({
        "model": "audex",
        "voice": "default",
        "input": "The same sentence each time.",
        "response_format": "wav",
    });
    vec![
        Request {
            form: Form::Speech,
            body,
            leave: None
        };
        count
    ]
}

/// Sends the first third one after another and the rest four at once. An answer that is not 200 is an error.
pub(crate) fn send(port: u16, requests: &[Request]) -> Result<Vec<Outcome>> {
    let (alone, together) = requests.split_at(requests.len() / 3);
    let mut outcomes = at_once(port, alone, 1)?;
    outcomes.extend(at_once(port, together, CONCURRENT)?);
    Ok(outcomes)
}

/// Sends requests with so many clients; outcomes are in the order of the requests' ends.
pub(crate) fn at_once(port: u16, requests: &[Request], clients: usize) -> Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..clients)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let outcome =
                            one(port, request).with_context(|| format!("the request {}", request.body))?;
                        outcomes
                            .lock()
                            .map_err(|_| anyhow::anyhow!("another client failed"))?
                            .push(outcome);
                    }
                    Ok(())
                })
            })
            .collect();
        for client in clients {
            client
                .join()
                .map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        anyhow::Ok(())
    })?;
    outcomes.into_inner().context("a client failed")
}

/// A client for one request: a connection of its own, closed with the answer.
fn client(limit: Duration) -> ureq::Agent {
    ureq::Agent::config_builder()
        .timeout_global(Some(limit))
        .max_idle_connections(0)
        .http_status_as_error(false)
        .build()
        .into()
}

/// Gets a page as text.
pub(crate) fn get(url: &str) -> Result<String> {
    let mut answer = client(Duration::from_secs(20)).get(url).call()?;
    ensure!(answer.status().is_success(), "{url} answered {}", answer.status());
    Ok(answer.body_mut().read_to_string()?)
}

fn one(port: u16, request: &Request) -> Result<Outcome> {
    if request.form == Form::SpeechSocket {
        return socket(port, request);
    }
    let url = format!("http://127.0.0.1:{port}{}", request.form.path());
    let limit = match request.leave {
        Some(Leave::Time(time)) => time,
        _ => LIMIT,
    };
    let start = Instant::now();
    let mut outcome = Outcome::of(request);
    let answer = match client(limit).post(url).send_json(&request.body) {
        Err(ureq::Error::Timeout(_)) if matches!(request.leave, Some(Leave::Time(_))) => {
            outcome.left = true;
            outcome.seconds = start.elapsed().as_secs_f64();
            return Ok(outcome);
        }
        answer => answer?,
    };
    let status = answer.status();
    let mut body = BufReader::with_capacity(1 << 16, answer.into_body().into_reader());
    if !status.is_success() {
        let mut text = String::new();
        body.read_to_string(&mut text)?;
        anyhow::bail!("{status}: {text}");
    }
    let packets = match request.leave {
        Some(Leave::Packets(n)) => n,
        _ => usize::MAX,
    };
    match request.form {
        Form::Completion | Form::Chat => outcome.note(&serde_json::from_reader(body)?),
        Form::Images => outcome.images = images(&serde_json::from_reader(body)?)?,
        Form::Speech => {
            let mut file = Vec::new();
            body.read_to_end(&mut file)?;
            outcome.frames = file.len().saturating_sub(WAV_HEADER) / BYTES_A_FRAME;
        }
        Form::SpeechStream => {
            let mut bytes = 0;
            let mut seen = 0;
            while seen < packets {
                let got = body.fill_buf()?.len();
                if got == 0 {
                    break;
                }
                outcome.first_packet.get_or_insert(start.elapsed().as_secs_f64());
                bytes += got;
                seen += 1;
                body.consume(got);
            }
            outcome.left = seen == packets;
            outcome.frames = bytes / BYTES_A_FRAME;
        }
        // Without an answer's body: see `socket`.
        Form::SpeechSocket => {}
        Form::CompletionStream | Form::ChatStream | Form::SpeechEvents => {
            let mut seen = 0;
            for line in body.lines() {
                let line = line?;
                let Some(data) = line.strip_prefix("data: ").filter(|d| *d != "[DONE]") else {
                    continue;
                };
                outcome.first_packet.get_or_insert(start.elapsed().as_secs_f64());
                outcome.note(&serde_json::from_str(data)?);
                seen += 1;
                if seen == packets {
                    outcome.left = true;
                    break;
                }
            }
        }
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    Ok(outcome)
}

/// One utterance of a session of its own: a request like those over HTTP, and its samples as binary messages.
fn socket(port: u16, request: &Request) -> Result<Outcome> {
    let packets = match request.leave {
        Some(Leave::Packets(n)) => n,
        _ => usize::MAX,
    };
    let mut outcome = Outcome::of(request);
    let peer = TcpStream::connect(("127.0.0.1", port))?;
    peer.set_read_timeout(Some(LIMIT))?;
    let url = format!("ws://127.0.0.1:{port}{}", request.form.path());
    let (mut socket, _) =
        tungstenite::client(url, peer).map_err(|error| anyhow::anyhow!("no WebSocket: {error}"))?;
    let mut config = request.body.clone();
    config["type"] = json!("session.config");
    let text = config["input"].take();
    socket.send(config.to_string().into())?;
    socket.send(json!({"type": "input.text", "text": text}).to_string().into())?;
    // The text is spoken as a whole once it is complete.
    let start = Instant::now();
    socket.send(json!({"type": "input.done"}).to_string().into())?;
    let mut seen = 0;
    loop {
        match socket.read()? {
            Message::Binary(samples) => {
                outcome.first_packet.get_or_insert(start.elapsed().as_secs_f64());
                outcome.frames += samples.len() / BYTES_A_FRAME;
                seen += 1;
                if seen == packets {
                    outcome.left = true;
                    break;
                }
            }
            Message::Text(text) => {
                let told: Value = serde_json::from_str(&text)?;
                match told["type"].as_str() {
                    Some("error") => anyhow::bail!("the session failed: {text}"),
                    Some("session.done") => break,
                    _ => {}
                }
            }
            Message::Close(reason) => anyhow::bail!("the server closed the session: {reason:?}"),
            _ => {}
        }
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    Ok(outcome)
}

/// How many images a JSON answer has. One without any is an error.
fn images(answer: &Value) -> Result<usize> {
    let images = answer["data"].as_array().map_or(0, Vec::len);
    ensure!(images > 0, "an answer without images");
    Ok(images)
}

impl Outcome {
    /// Of a request that has not been sent yet.
    fn of(request: &Request) -> Self {
        Self {
            form: request.form,
            left: false,
            seconds: 0.0,
            first_packet: None,
            finish: Vec::new(),
            prompt_tokens: None,
            text: request.body["input"].as_str().map_or(0, str::len),
            output_tokens: None,
            frames: 0,
            images: 0,
        }
    }

    /// Takes what a JSON answer or event says.
    fn note(&mut self, answer: &Value) {
        for choice in answer["choices"].as_array().into_iter().flatten() {
            if let Some(reason) = choice["finish_reason"].as_str() {
                self.finish.push(reason.to_owned());
            }
        }
        let usage = &answer["usage"];
        for name in ["prompt_tokens", "input_tokens"] {
            self.prompt_tokens = usage[name].as_u64().or(self.prompt_tokens);
        }
        for name in ["completion_tokens", "output_tokens"] {
            self.output_tokens = usage[name].as_u64().or(self.output_tokens);
        }
        if let Some(audio) = answer["audio"].as_str() {
            let padding = audio.bytes().rev().take_while(|&b| b == b'=').count();
            self.frames += (audio.len() / 4 * 3).saturating_sub(padding) / BYTES_A_FRAME;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, io::Write, net::TcpListener};

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::text(Kind::Vllm { parallel: false }, 4)]
    #[case::speech(Kind::Omni { log_stats: true }, 4)]
    #[case::pictures(Kind::Picture { inline: false }, 1)]
    fn a_run_has_every_form_and_some_that_leave(#[case] kind: Kind, #[case] forms: usize) {
        let all = requests(kind, 30);
        let found: BTreeSet<Form> = all.iter().map(|r| r.form).collect();
        assert_eq!(found.len(), forms);
        let left = all.iter().filter(|r| r.leave.is_some()).count();
        assert!((4..=6).contains(&left), "{left}");
        let leaves_midway = |r: &Request| r.form.streams() && matches!(r.leave, Some(Leave::Packets(_)));
        assert_eq!(
            all.iter().any(leaves_midway),
            all.iter().any(|r| r.form.streams())
        );
        assert!(all.iter().any(|r| matches!(r.leave, Some(Leave::Time(_)))));
    }

    /// A server that answers one request with `answer` and says how many bytes it could write.
    fn serve(answer: String) -> (u16, std::thread::JoinHandle<()>) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let thread = std::thread::spawn(move || {
            let (mut peer, _) = socket.accept().unwrap();
            let mut head = [0; 4096];
            let _ = peer.read(&mut head).unwrap();
            let _ = peer.write_all(answer.as_bytes());
        });
        (port, thread)
    }

    #[test]
    fn events_give_finish_usage_and_frames() {
        let events = "event: a\ndata: {\"audio\":\"AAAA\"}\n\ndata: {\"audio\":\"AAA=\"}\n\n\
                      data: {\"choices\":[{\"finish_reason\":\"length\"}],\
                      \"usage\":{\"prompt_tokens\":5,\"completion_tokens\":7}}\n\ndata: [DONE]\n\n";
        let (port, server) = serve(format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{events}"));
        let request = Request {
            form: Form::ChatStream,
            body: json!({}),
            leave: None,
        };
        let outcome = one(port, &request).unwrap();
        server.join().unwrap();
        assert_eq!(
            (
                outcome.finish,
                outcome.prompt_tokens,
                outcome.output_tokens,
                outcome.frames,
                outcome.left
            ),
            (vec!["length".to_owned()], Some(5), Some(7), 2, false)
        );
        assert!(outcome.first_packet.is_some_and(|t| t <= outcome.seconds));
    }

    #[test]
    fn a_client_leaves_after_its_packets() {
        let (port, server) = serve(format!(
            "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}",
            "data: {}\n\n".repeat(50)
        ));
        let request = Request {
            form: Form::CompletionStream,
            body: json!({}),
            leave: Some(Leave::Packets(3)),
        };
        let outcome = one(port, &request).unwrap();
        server.join().unwrap();
        assert!(outcome.left);
    }

    #[test]
    fn a_refused_request_is_an_error_with_its_text() {
        let (port, server) = serve("HTTP/1.1 400 Bad Request\r\ncontent-length: 4\r\n\r\nnope".to_owned());
        let request = Request {
            form: Form::Chat,
            body: json!({"model": "m"}),
            leave: None,
        };
        let error = format!("{:#}", at_once(port, &[request], 1).unwrap_err());
        server.join().unwrap();
        assert!(error.contains("nope") && error.contains("\"m\""), "{error}");
    }
}
