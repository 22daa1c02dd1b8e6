//! All reply bytes. Clients compare them byte for byte.

use statehouse_policy::resp;
use statehouse_policy::{Body, Bytes, Dialect, Fault, Frame, Outcome, Repeat, Request, Span};

/// Why a request is answered with `-ERR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The payload is not an array of bulk strings, or has an unknown option.
    Syntax,
    /// The command is unknown.
    UnknownCommand,
    /// The command has too few or too many arguments.
    WrongCount,
    /// The key is empty.
    EmptyKey,
    /// The client lacks the right.
    NotAuthorized,
    /// `__ts` is missing.
    MissingTimestamp,
    /// `__ts` or `__ft` is not an HLC timestamp.
    MalformedTimestamp,
    /// `__ts` is too far ahead of the store's time.
    TimestampAhead,
    /// `__ft` is too far ahead of the store's time.
    FenceAhead,
    /// The key has a fence, but the request has no token.
    FenceMissing,
    /// The key has a higher fence.
    FenceLower,
    /// A quota is exceeded.
    Quota,
    /// Another error text, of the host or of a policy built on this one.
    Other(String),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Denied => Self::NotAuthorized,
            Fault::Quota => Self::Quota,
            Fault::Other(text) => Self::Other(text),
        }
    }
}

impl Refusal {
    /// Whether the form of the request is the only reason: it would be refused on any table at any
    /// time.
    pub(crate) fn is_of_form(&self) -> bool {
        match self {
            Self::Syntax
            | Self::UnknownCommand
            | Self::WrongCount
            | Self::EmptyKey
            | Self::MissingTimestamp
            | Self::MalformedTimestamp => true,
            Self::NotAuthorized
            | Self::TimestampAhead
            | Self::FenceAhead
            | Self::FenceMissing
            | Self::FenceLower
            | Self::Quota
            | Self::Other(_) => false,
        }
    }

    fn text(&self, dialect: Dialect) -> &str {
        match self {
            Self::Syntax => "syntax error",
            Self::UnknownCommand => "unknown command",
            Self::WrongCount => "wrong number of arguments",
            Self::EmptyKey => "the key length is zero",
            Self::NotAuthorized => "not authorized",
            Self::MissingTimestamp => "missing timestamp",
            Self::MalformedTimestamp => "malformed timestamp",
            Self::TimestampAhead => {
                "the request timestamp is too far in the future; \
                 ensure that the client and broker system clocks are synchronized"
            }
            Self::FenceAhead => {
                "the request fencing token timestamp is too far in the future; \
                 ensure that the client and broker system clocks are synchronized"
            }
            Self::FenceMissing => "a fencing token is required for this request",
            Self::FenceLower => match dialect {
                Dialect::Sdk => {
                    "the request fencing token is a lower version \
                     than the fencing token protecting the resource"
                }
                // The article's own mistake, which clients of these dialects compare with.
                Dialect::Documents | Dialect::Preview => {
                    "the request fencing token is a lower version \
                     that the fencing token protecting the resource"
                }
            },
            Self::Quota => "the quota has been exceeded",
            Self::Other(text) => text,
        }
    }

    /// The complete reply. A duplicate gets the same refusal; if the form of the request is the
    /// only reason, it is parsed again.
    #[must_use]
    pub fn outcome(&self, request: &Request, command: Option<u16>) -> Outcome {
        Outcome {
            reply: self.frame(request.dialect),
            version: None,
            repeat: if self.is_of_form() {
                Repeat::Free
            } else {
                Repeat::Same
            },
            command,
        }
    }

    pub(crate) fn frame(&self, dialect: Dialect) -> Frame {
        let text = self.text(dialect);
        let mut head = Vec::with_capacity(text.len() + "-ERR \r\n".len());
        resp::push_error(&mut head, text);
        whole(head)
    }
}

/// A reply without a value to splice in.
fn whole(head: Vec<u8>) -> Frame {
    Frame {
        head,
        body: Body::None,
    }
}

pub(crate) fn ok() -> Frame {
    whole(b"+OK\r\n".to_vec())
}

/// KEYNOTIFY without a version, or its STOP: `:0` if there was no watch to end.
pub(crate) fn done(is_done: bool) -> Frame {
    if is_done { ok() } else { removed(false) }
}

/// KEYNOTIFY from a version: there are more changes to send.
pub(crate) fn more() -> Frame {
    whole(b"+MORE\r\n".to_vec())
}

/// GET of an absent key.
pub(crate) fn absent() -> Frame {
    whole(b"$-1\r\n".to_vec())
}

/// DEL, VDEL and STOP: the number of removed entries or watches.
pub(crate) fn removed(any: bool) -> Frame {
    let line = if any { b":1\r\n" } else { b":0\r\n" };
    whole(line.to_vec())
}

/// A SET whose condition failed.
pub(crate) fn not_set(dialect: Dialect) -> Frame {
    whole(match dialect {
        Dialect::Sdk | Dialect::Preview => b":-1\r\n".to_vec(),
        Dialect::Documents => b"-1\r\n".to_vec(),
    })
}

/// A VDEL whose value differs.
pub(crate) fn not_deleted(dialect: Dialect) -> Frame {
    whole(match dialect {
        Dialect::Sdk => b":-1\r\n".to_vec(),
        Dialect::Documents => b"-1\r\n".to_vec(),
        Dialect::Preview => b":0\r\n".to_vec(),
    })
}

/// A stored value, which the host splices in after the head.
pub(crate) fn value(key: Span, len: u32) -> Frame {
    Frame {
        head: resp::head(b'$', u64::from(len)),
        body: Body::Stored(Bytes::Span(key)),
    }
}

/// An array of names, each followed by its value.
pub(crate) fn pairs(pairs: &[(&str, String)]) -> Frame {
    let mut head = resp::head(b'*', 2 * pairs.len() as u64);
    for (name, value) in pairs {
        resp::push_bulk(&mut head, name.as_bytes());
        resp::push_bulk(&mut head, value.as_bytes());
    }
    whole(head)
}

/// The keys of a page (already bulk strings) and the token of the next one.
pub(crate) fn page(count: u64, keys: &[u8], token: Option<&[u8]>) -> Frame {
    let mut head = Vec::with_capacity(keys.len() + token.map_or(0, <[u8]>::len) + 64);
    resp::push_head(&mut head, b'*', if token.is_some() { 2 } else { 1 });
    resp::push_head(&mut head, b'*', count);
    head.extend_from_slice(keys);
    if let Some(token) = token {
        resp::push_bulk(&mut head, token);
    }
    whole(head)
}
