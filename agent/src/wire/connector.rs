//! Keys under which vLLM-Omni's connectors move payloads between stages (docs/wire.md section "Connectors").

/// Longest name of a shared-memory segment (`NAME_MAX` of Linux), in bytes.
pub(crate) const MAX_SEGMENT_NAME: usize = 255;
/// Longest key that is looked at, in bytes: a request id with whatever stands around it.
pub const MAX_KEY: usize = 512;
/// Highest stage number that is taken for one. What other programs end their names with are process ids.
const MAX_STAGE: u32 = 1023;

/// First characters of segment names that other libraries use: Python, `PyTorch`, semaphores, lock files, MPI, OpenMP.
const FOREIGN: [&str; 6] = ["psm_", "torch_", "sem.", "shm_", "vader_", "__KMP"];

/// What a key tells of its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key<'a> {
    /// What is moved under it.
    pub kind: Kind,
    /// Internal id of the request.
    pub request_id: &'a str,
    /// The sending stage, where the key names it.
    pub from_stage: Option<u32>,
    /// The receiving stage, where the key names it.
    pub to_stage: Option<u32>,
    /// Which part of the request's data, from 0.
    pub chunk: Option<u32>,
    /// Ranks of sender and receiver inside their replicas, where a payload is split among ranks.
    pub ranks: Option<(u32, u32)>,
}

/// What is moved under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// One chunk of a request's output, or all of it.
    Chunk,
    /// KV cache of a request, or one rank's share of it.
    KvCache,
    /// Something under a key of no known form.
    Other,
}

impl<'a> Key<'a> {
    /// The key that is the name of a shared-memory segment, with or without the leading slash. `None`: the segment is
    /// no connector's.
    #[must_use]
    pub fn of_segment(name: &'a str) -> Option<Self> {
        let name = name.strip_prefix('/').unwrap_or(name);
        if name.len() > MAX_SEGMENT_NAME || FOREIGN.iter().any(|prefix| name.starts_with(prefix)) {
            return None;
        }
        let key = Self::base(name)?;
        // The part of an id that the server makes up is set off by a hyphen; most other names have none.
        let is_id = match key.kind {
            Kind::KvCache if key.to_stage.is_some() => true,
            _ => key.request_id.contains('-'),
        };
        is_id.then_some(key)
    }

    /// The key of a store's object: one of the known forms with the stages behind it. `None`: the object is no stage's.
    #[must_use]
    pub fn of_object(name: &'a str) -> Option<Self> {
        let (base, edge) = name.rsplit_once(['@', ':'])?;
        let (from, to) = stages(edge)?;
        let key = Self::base(base).filter(|_| name.len() <= MAX_KEY)?;
        Some(Self {
            from_stage: Some(from),
            to_stage: Some(to),
            ..key
        })
    }

    /// The key in a transfer engine's message or of a store's entry: one of the known forms, as it is or with the
    /// stages behind it (`{key}@{from}_{to}`, `{key}:{from}_{to}`). `None`: empty, too long, or no text of one line.
    #[must_use]
    pub fn of_message(text: &'a str) -> Option<Self> {
        if text.is_empty() || text.len() > MAX_KEY || !is_text(text) {
            return None;
        }
        let (base, edge) = match text.rsplit_once(['@', ':']) {
            Some((base, edge)) if !base.is_empty() => match stages(edge) {
                Some(edge) => (base, Some(edge)),
                None => (text, None),
            },
            _ => (text, None),
        };
        let mut key = Self::base(base).unwrap_or(Self {
            kind: Kind::Other,
            request_id: base,
            from_stage: None,
            to_stage: None,
            chunk: None,
            ranks: None,
        });
        if let Some((from, to)) = edge {
            key.from_stage = Some(from);
            key.to_stage = Some(to);
        }
        Some(key)
    }

    fn base(text: &'a str) -> Option<Self> {
        if text.is_empty() || !is_text(text) {
            return None;
        }
        Self::kv_cache(text).or_else(|| Self::chunk(text))
    }

    /// `omni_{from}_to_{to}_kv_cache_{request id}`
    fn kv_cache(text: &'a str) -> Option<Self> {
        let (from, rest) = text.strip_prefix("omni_")?.split_once("_to_")?;
        let (to, request_id) = rest.split_once("_kv_cache_")?;
        if request_id.is_empty() {
            return None;
        }
        Some(Self {
            kind: Kind::KvCache,
            request_id,
            from_stage: Some(stage(from)?),
            to_stage: Some(stage(to)?),
            chunk: None,
            ranks: None,
        })
    }

    /// `{request id}_{from}_{chunk}`, and with two ranks behind it one rank's share of a KV cache. An id never ends in
    /// two numbers of its own: what the server puts at its end has a hyphen before it.
    fn chunk(text: &'a str) -> Option<Self> {
        let (rest, last) = behind(text)?;
        let (rest, before) = behind(rest)?;
        let ranked = behind(rest).and_then(|(rest, chunk)| {
            let (request_id, from) = behind(rest)?;
            let is_whole = !request_id.is_empty() && from <= MAX_STAGE;
            is_whole.then_some((request_id, from, chunk))
        });
        if let Some((request_id, from, chunk)) = ranked {
            return Some(Self {
                kind: Kind::KvCache,
                request_id,
                from_stage: Some(from),
                to_stage: None,
                chunk: Some(chunk),
                ranks: Some((before, last)),
            });
        }
        (!rest.is_empty() && before <= MAX_STAGE).then_some(Self {
            kind: Kind::Chunk,
            request_id: rest,
            from_stage: Some(before),
            to_stage: None,
            chunk: Some(last),
            ranks: None,
        })
    }
}

/// `{from}_{to}`
fn stages(text: &str) -> Option<(u32, u32)> {
    let (from, to) = text.split_once('_')?;
    Some((stage(from)?, stage(to)?))
}

fn stage(text: &str) -> Option<u32> {
    number(text).filter(|stage| *stage <= MAX_STAGE)
}

/// Takes the number behind the last underscore off.
fn behind(text: &str) -> Option<(&str, u32)> {
    let (rest, last) = text.rsplit_once('_')?;
    Some((rest, number(last)?))
}

/// A number as Python prints it: digits, no leading zeros.
fn number(text: &str) -> Option<u32> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    is_plain.then(|| text.parse().ok()).flatten()
}

/// Names and keys are one line, and no paths.
fn is_text(text: &str) -> bool {
    !text.chars().any(|c| c == '/' || c.is_control())
}
