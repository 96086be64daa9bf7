//! A connection whose client can't hold it: each phase of an exchange has a time that it may take.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use super::connections::{Phase, Place};

/// How long a phase may take.
fn limit(phase: Phase) -> Duration {
    match phase {
        Phase::Idle => Duration::from_mins(3),
        // Together: what works begins no time of its own.
        Phase::Request | Phase::Working => Duration::from_secs(5),
        Phase::Answer => Duration::from_secs(10),
    }
}

/// A stream that fails when a phase takes too long.
#[derive(Debug)]
pub(super) struct Deadline<S> {
    stream: S,
    /// Is told of each phase that the bytes tell of.
    place: Arc<Place>,
    phase: Phase,
    over: Pin<Box<Sleep>>,
}

impl<S> Deadline<S> {
    pub(super) fn new(stream: S, place: Arc<Place>) -> Self {
        let phase = Phase::Request;
        Self {
            stream,
            place,
            phase,
            over: Box::pin(sleep(limit(phase))),
        }
    }

    fn enter(&mut self, phase: Phase) {
        if self.phase != phase {
            self.phase = phase;
            self.place.enter(phase);
            self.over.as_mut().reset(Instant::now() + limit(phase));
        }
    }

    /// `Pending`, or the error once the time is over.
    fn pending<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        ready!(self.over.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Deadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Pending => self.pending(cx),
            done @ Poll::Ready(_) => {
                if self.phase == Phase::Idle {
                    self.enter(Phase::Request);
                }
                done
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> Deadline<S> {
    fn wrote(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.enter(Phase::Answer);
        match done {
            Poll::Pending => self.pending(cx),
            done @ Poll::Ready(_) => done,
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Deadline<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(cx, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_flush(cx) {
            Poll::Pending => self.pending(cx),
            done @ Poll::Ready(_) => {
                // The server flushes when all that it has of an answer is written.
                if self.phase == Phase::Answer {
                    self.enter(Phase::Idle);
                }
                done
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;
    use crate::serve::connections::Connections;

    fn place() -> Arc<Place> {
        Connections::new(1).admit().expect("a place").place
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_does_not_end_is_cut_off() {
        let (mut client, server) = duplex(64);
        let mut server = Deadline::new(server, place());
        let start = Instant::now();
        let slow = tokio::spawn(async move {
            // A byte a second is not enough.
            while client.write_all(b"x").await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let mut taken = Vec::new();
        let error = server.read_to_end(&mut taken).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), limit(Phase::Request).as_secs());
        slow.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_taken_is_cut_off() {
        let (mut client, server) = duplex(64);
        let mut server = Deadline::new(server, place());
        let start = Instant::now();
        let slow = tokio::spawn(async move {
            let mut byte = [0];
            while client.read_exact(&mut byte).await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
        });
        let error = server.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), limit(Phase::Answer).as_secs());
        slow.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_rest_between_scrapes() {
        let (mut client, server) = duplex(64);
        let mut server = Deadline::new(server, place());
        for _ in 0..3 {
            client.write_all(b"request").await.unwrap();
            let mut request = [0; 7];
            server.read_exact(&mut request).await.unwrap();
            server.write_all(b"answer").await.unwrap();
            server.flush().await.unwrap();
            let mut answer = [0; 6];
            client.read_exact(&mut answer).await.unwrap();
            let mut next = [0; 1];
            let rest = tokio::time::timeout(Duration::from_mins(1), server.read(&mut next)).await;
            assert!(rest.is_err(), "the connection ended while it was idle");
        }
    }
}
