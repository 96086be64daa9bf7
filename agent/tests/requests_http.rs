//! `/api/requests`, and the client that reads it.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use omnitap::{
    config::{ListenAddress, RequestLog},
    metrics::{
        catalogue::Family,
        registry::{Limits, Registry},
    },
    pipeline::records::{Outcome, RequestRecord},
    requests::{
        Page, Requests, Settings as RequestSettings,
        client::{self, ClientError},
    },
    serve::{Content, Server, Settings, Status},
};
use rstest::rstest;
use tempfile::TempDir;

struct Running {
    address: ListenAddress,
    requests: Option<Requests>,
    registry: Registry,
    _dir: TempDir,
}

/// A server on a Unix socket or a TCP port.
async fn start(by_socket: bool, keep: Option<usize>, web_config: Option<&str>) -> Running {
    let registry = Registry::new(Limits {
        max_series: 10_000,
        retention: Duration::from_mins(15),
    });
    let requests = keep.and_then(|keep| {
        let settings = RequestSettings {
            served: true,
            keep,
            max_rate: 100_000,
            log: RequestLog::Off,
        };
        Requests::new(settings, registry.own())
    });
    let dir = TempDir::new().unwrap();
    let web_config = web_config.map(|text| {
        let path = dir.path().join("web.yaml");
        std::fs::write(&path, text).unwrap();
        path
    });
    let content = Content {
        exposition: registry.exposition(),
        own: registry.own(),
        status: Status::default(),
        requests: requests.clone(),
    };
    let listen = if by_socket {
        ListenAddress::Unix(dir.path().join("http.sock"))
    } else {
        "127.0.0.1:0".parse().unwrap()
    };
    let settings = Settings {
        listen: vec![listen.clone()],
        max_connections: 8,
        web_config,
    };
    let server = Server::bind(&settings, content).await.unwrap();
    let address = match server.addresses().first() {
        Some(address) => address.to_string().parse().unwrap(),
        None => listen,
    };
    tokio::spawn(server.run(std::future::pending(), Duration::ZERO));
    Running {
        address,
        requests,
        registry,
        _dir: dir,
    }
}

fn record(number: usize) -> RequestRecord {
    RequestRecord {
        request_id: number.to_string(),
        model: Some("m".to_owned()),
        pipeline_pid: 7,
        arrived_unix_ms: None,
        ended_unix_ms: Some(1),
        e2e_ms: Some(1.5),
        outcome: Outcome::Aborted,
        reason: "client_disconnect".into(),
        prompt_tokens: None,
        generated_tokens: 3,
        stages: Vec::new(),
        transfers: Vec::new(),
    }
}

impl Running {
    fn end(&self, count: usize) {
        let records = (0..count).map(record).collect();
        self.requests.as_ref().unwrap().ended(records, 0, 1);
    }

    async fn page(&self, after: u64) -> Result<Page, ClientError> {
        client::get(&self.address, &format!("/api/requests?after={after}")).await
    }

    fn counted(&self, family: Family) -> Vec<(String, f64)> {
        let mut text = Vec::new();
        self.registry
            .exposition()
            .render(&mut text, omnitap::metrics::text::Format::Text);
        let text = String::from_utf8(text).unwrap();
        let lines = text.lines().filter(|line| line.starts_with(family.name()));
        lines
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap();
                (series.to_owned(), value.parse().unwrap())
            })
            .collect()
    }
}

#[rstest]
#[case::tcp(false)]
#[case::unix_socket(true)]
#[tokio::test]
async fn a_reader_pages_through_the_records(#[case] by_socket: bool) {
    let running = start(by_socket, Some(1_000), None).await;
    running.end(450);
    let (mut last, mut had) = (0, Vec::new());
    loop {
        let page = running.page(last).await.unwrap();
        assert_eq!(page.missed, 0);
        last = page.last;
        had.extend(page.records);
        if !page.more {
            break;
        }
    }
    assert_eq!(had, (0..450).map(record).collect::<Vec<_>>());
    assert!(running.page(last).await.unwrap().records.is_empty());
    let taken = running.counted(Family::OmnitapRequestRecordsTotal);
    let series = "omnitap_request_records_total{result=\"taken\"}".to_owned();
    assert_eq!(taken, [(series, 450.0)]);
}

#[tokio::test]
async fn a_slow_reader_is_told_what_it_has_missed() {
    let running = start(false, Some(10), None).await;
    running.end(5);
    let last = running.page(0).await.unwrap().last;
    running.end(30);
    let page = running.page(last).await.unwrap();
    assert_eq!((page.missed, page.records.len()), (20, 10));
    let missed = running.counted(Family::OmnitapRequestRecordsMissedTotal);
    assert!((missed[0].1 - 20.0).abs() < 1e-9);
}

#[tokio::test]
async fn without_the_setting_there_is_nothing_to_read() {
    let running = start(false, None, None).await;
    let error = running.page(0).await.unwrap_err();
    assert!(
        matches!(&error, ClientError::Refused { status: 404, reason, .. } if reason.contains("requests.enabled")),
        "{error}"
    );
}

#[rstest]
#[case("after=")]
#[case("after=-1")]
#[case("after=1&x=2")]
#[case("x")]
#[tokio::test]
async fn another_question_is_refused(#[case] query: &str) {
    let running = start(false, Some(10), None).await;
    let error = client::get::<Page>(&running.address, &format!("/api/requests?{query}")).await;
    let error = error.unwrap_err();
    assert!(
        matches!(error, ClientError::Refused { status: 400, .. }),
        "{error}"
    );
}

/// The rights of a socket's file say who may open it.
#[rstest]
#[case::tcp(false)]
#[case::unix_socket(true)]
#[tokio::test]
async fn request_ids_are_behind_the_password(#[case] by_socket: bool) {
    let users = "basic_auth_users: { u: \"$2b$04$VKZ0sg7VbGQCh8UFs2kZ7eq6o8kB1bEdb8Q8pR8lY8dW3p7B7lG7K\" }";
    let running = start(by_socket, Some(10), Some(users)).await;
    running.end(1);
    match running.page(0).await {
        Ok(page) => assert!(by_socket && page.records.len() == 1),
        Err(error) => {
            assert!(
                !by_socket && matches!(error, ClientError::Unauthorized { .. }),
                "{error}"
            );
        }
    }
}

#[tokio::test]
async fn nobody_listens() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address: ListenAddress = nobody.local_addr().unwrap().to_string().parse().unwrap();
    drop(nobody);
    let error = client::get::<Page>(&address, "/api/requests").await.unwrap_err();
    assert!(error.to_string().contains("start `omnitap run`"), "{error}");
}

#[rstest]
#[case::no_http("hello\n", "does not answer as an agent does")]
#[case::another_document("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "can't be read")]
#[case::words("HTTP/1.1 503 no\r\ncontent-length: 4\r\n\r\nno\x1b!", "503: no!")]
#[tokio::test]
async fn something_else_listens(#[case] answer: &'static str, #[case] told: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: ListenAddress = other.local_addr().unwrap().to_string().parse().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = other.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        let _ = stream.shutdown().await;
    });
    let error = client::get::<Page>(&address, "/api/requests").await.unwrap_err();
    assert!(error.to_string().contains(told), "{error}");
}
