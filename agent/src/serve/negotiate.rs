//! Which form and encoding of `/metrics` a client wants: Accept and Accept-Encoding with their weights (RFC 9110, 12.5).

use crate::metrics::text::Format;

/// How the body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// As it is.
    Identity,
    /// gzip.
    Gzip,
}

/// The form that the Accept headers rate highest. Text where they leave it open: a wildcard is no wish for OpenMetrics.
pub(super) fn format<'a>(accept: impl Iterator<Item = &'a str>) -> Format {
    let mut openmetrics: Option<f32> = None;
    let mut text: Option<f32> = None;
    let mut wildcard: Option<f32> = None;
    for item in items(accept) {
        let version = item.parameter("version");
        let slot = match item.name.to_ascii_lowercase().as_str() {
            // 0.0.1 is a draft that this text fulfils as well.
            "application/openmetrics-text" if matches!(version, None | Some("1.0.0" | "0.0.1")) => {
                &mut openmetrics
            }
            "text/plain" if matches!(version, None | Some("0.0.4")) => &mut text,
            "text/*" | "*/*" => &mut wildcard,
            _ => continue,
        };
        *slot = Some(slot.unwrap_or(0.0).max(item.weight()));
    }
    let text = text.or(wildcard).unwrap_or(0.0);
    match openmetrics {
        Some(weight) if weight > 0.0 && weight >= text => Format::OpenMetrics,
        _ => Format::Text,
    }
}

/// gzip where the client takes it and does not like the plain form better.
pub(super) fn encoding<'a>(accept: impl Iterator<Item = &'a str>) -> Encoding {
    let mut gzip: Option<f32> = None;
    let mut identity: Option<f32> = None;
    let mut wildcard: Option<f32> = None;
    for item in items(accept) {
        let slot = match item.name.to_ascii_lowercase().as_str() {
            "gzip" | "x-gzip" => &mut gzip,
            "identity" => &mut identity,
            "*" => &mut wildcard,
            _ => continue,
        };
        *slot = Some(item.weight());
    }
    let gzip = gzip.or(wildcard).unwrap_or(0.0);
    // Plain is always acceptable unless excluded, but only a weight of its own says that it is liked.
    if gzip > 0.0 && gzip >= identity.unwrap_or(0.0) {
        Encoding::Gzip
    } else {
        Encoding::Identity
    }
}

/// One item of a list header.
struct Item<'a> {
    name: &'a str,
    parameters: &'a str,
}

impl<'a> Item<'a> {
    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.parameters.split(';').find_map(|p| {
            let (key, value) = p.split_once('=')?;
            key.trim()
                .eq_ignore_ascii_case(name)
                .then(|| value.trim().trim_matches('"'))
        })
    }

    /// 1 where nothing is said, 0 where it can't be read: what is not understood is not wanted.
    fn weight(&self) -> f32 {
        match self.parameter("q") {
            None => 1.0,
            Some(text) => text
                .parse()
                .ok()
                .filter(|q| (0.0..=1.0).contains(q))
                .unwrap_or(0.0),
        }
    }
}

fn items<'a>(headers: impl Iterator<Item = &'a str>) -> impl Iterator<Item = Item<'a>> {
    headers.flat_map(|h| h.split(',')).map(|item| {
        let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
        Item {
            name: name.trim(),
            parameters,
        }
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::nothing(&[], Format::Text)]
    #[case::empty(&[""], Format::Text)]
    #[case::curl(&["*/*"], Format::Text)]
    #[case::browser(&["text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"], Format::Text)]
    #[case::prometheus_2(
        &["application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
           text/plain;version=0.0.4;q=0.5,*/*;q=0.1"],
        Format::OpenMetrics
    )]
    #[case::prometheus_3(
        &["application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
           application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
           text/plain;version=0.0.4;q=0.3,*/*;q=0.2"],
        Format::OpenMetrics
    )]
    #[case::prometheus_3_text_first(
        &["text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,\
           application/openmetrics-text;version=1.0.0;q=0.4,*/*;q=0.2"],
        Format::Text
    )]
    #[case::protobuf_first(
        &["application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,\
           application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"],
        Format::OpenMetrics
    )]
    #[case::excluded(&["application/openmetrics-text;q=0, text/plain;q=0.1"], Format::Text)]
    #[case::unknown_version(&["application/openmetrics-text; version=2.0.0"], Format::Text)]
    #[case::openmetrics_alone(&["application/openmetrics-text; version=1.0.0; charset=utf-8"], Format::OpenMetrics)]
    #[case::any_case(&["Application/OpenMetrics-Text;Version=\"1.0.0\""], Format::OpenMetrics)]
    #[case::two_headers(&["text/plain;q=0.2", "application/openmetrics-text"], Format::OpenMetrics)]
    #[case::broken_weight(&["application/openmetrics-text;q=x"], Format::Text)]
    #[case::weight_out_of_range(&["application/openmetrics-text;q=7,text/plain"], Format::Text)]
    fn accept_decides_the_form(#[case] accept: &[&str], #[case] wanted: Format) {
        assert_eq!(format(accept.iter().copied()), wanted);
    }

    #[rstest]
    #[case::nothing(&[], Encoding::Identity)]
    #[case::prometheus(&["gzip"], Encoding::Gzip)]
    #[case::curl(&["deflate, gzip, br, zstd"], Encoding::Gzip)]
    #[case::wildcard(&["*"], Encoding::Gzip)]
    #[case::excluded(&["gzip;q=0"], Encoding::Identity)]
    #[case::excluded_from_wildcard(&["gzip;q=0, *"], Encoding::Identity)]
    #[case::identity_liked_better(&["identity, gzip;q=0.5"], Encoding::Identity)]
    #[case::gzip_liked_better(&["identity;q=0.5, gzip"], Encoding::Gzip)]
    #[case::others(&["br, zstd"], Encoding::Identity)]
    fn accept_encoding_decides_the_encoding(#[case] accept: &[&str], #[case] wanted: Encoding) {
        assert_eq!(encoding(accept.iter().copied()), wanted);
    }
}
