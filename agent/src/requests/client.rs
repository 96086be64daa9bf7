//! The client's side: asks a running agent, over TCP or a Unix socket.

use std::{io, time::Duration};

use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{HOST, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::timeout,
};

use crate::config::ListenAddress;

/// Longest time that an answer may take.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Longest answer in bytes.
const MAX_BYTES: usize = 32 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error(
        "no agent can be reached at {address}: {source}; start `omnitap run`, or name its web.listen-address with --agent"
    )]
    Connect {
        /// The address.
        address: ListenAddress,
        /// What the system says.
        source: io::Error,
    },
    /// What answers speaks no plain HTTP.
    #[error(
        "{address} does not answer as an agent does: {reason}; where it has TLS, give it a Unix socket as a further web.listen-address"
    )]
    Http {
        /// The address.
        address: ListenAddress,
        /// What is wrong.
        reason: String,
    },
    /// It takes too long.
    #[error("the agent at {address} does not answer within {} s", TIMEOUT.as_secs())]
    Timeout {
        /// The address.
        address: ListenAddress,
    },
    /// A user is needed.
    #[error(
        "the agent at {address} wants a user and a password: ask it over a Unix socket (a further web.listen-address)"
    )]
    Unauthorized {
        /// The address.
        address: ListenAddress,
    },
    /// It says no.
    #[error("the agent at {address} refuses: {status}: {reason}")]
    Refused {
        /// The address.
        address: ListenAddress,
        /// Status of the answer.
        status: u16,
        /// Its words.
        reason: String,
    },
    /// The answer can't be read.
    #[error("the answer of the agent at {address} can't be read ({reason}): is it of another version?")]
    Malformed {
        /// The address.
        address: ListenAddress,
        /// What is wrong.
        reason: String,
    },
}

/// Asks the agent at an address for a JSON document.
pub async fn get<T: DeserializeOwned>(address: &ListenAddress, path: &str) -> Result<T, ClientError> {
    let answer = async {
        let connect = |source| ClientError::Connect {
            address: address.clone(),
            source,
        };
        match address {
            ListenAddress::Tcp { host, port } => {
                // An agent that listens everywhere listens on this machine.
                let host = match host.as_deref() {
                    None | Some("0.0.0.0" | "::") => "localhost",
                    Some(host) => host,
                };
                let stream = TcpStream::connect((host, *port)).await.map_err(connect)?;
                exchange(address, stream, path).await
            }
            ListenAddress::Unix(socket) => {
                let stream = UnixStream::connect(socket).await.map_err(connect)?;
                exchange(address, stream, path).await
            }
        }
    };
    let body = timeout(TIMEOUT, answer)
        .await
        .map_err(|_| ClientError::Timeout {
            address: address.clone(),
        })??;
    serde_json::from_slice(&body).map_err(|error| ClientError::Malformed {
        address: address.clone(),
        reason: error.to_string(),
    })
}

async fn exchange<S>(address: &ListenAddress, stream: S, path: &str) -> Result<Bytes, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let http = |error: &dyn std::error::Error| ClientError::Http {
        address: address.clone(),
        reason: error.to_string(),
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| http(&error))?;
    // It ends with the exchange; its errors show there.
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(HOST, "omnitap")
        .header(USER_AGENT, concat!("omnitap/", env!("CARGO_PKG_VERSION")))
        .body(Empty::<Bytes>::new())
        .map_err(|error| http(&error))?;
    let response = sender.send_request(request).await.map_err(|error| http(&error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_BYTES).collect().await;
    let body = body.map_err(|error| match error.downcast::<LengthLimitError>() {
        Ok(error) => http(&*error),
        Err(error) => http(&*error),
    })?;
    let body = body.to_bytes();
    match status {
        StatusCode::OK => Ok(body),
        StatusCode::UNAUTHORIZED => Err(ClientError::Unauthorized {
            address: address.clone(),
        }),
        status => Err(ClientError::Refused {
            address: address.clone(),
            status: status.as_u16(),
            reason: String::from_utf8_lossy(&body)
                .trim()
                .chars()
                .filter(|c| !c.is_control())
                .take(300)
                .collect(),
        }),
    }
}
