//! Encodes sessions and retained messages as a snapshot in pieces.
//!
//! Each piece is taken under the core's lock and holds the state of that moment as a batch of
//! changes for [`Recovery::apply`](crate::Recovery::apply). Recovery must apply all pieces, and
//! then every change since the first piece was begun. The result is the state at the end of these
//! changes.

use bytes::Bytes;
use statehouse_protocol::SessionId;

use crate::{
    change::{Change, Content, Encoder, Part, RecordedWill},
    clock::Clock,
    retained::Retained,
    session::Session,
    session_queue::Recorded,
};

/// The progress of a snapshot. The default is its beginning.
#[derive(Debug, Default)]
pub struct ImageCursor(Place);

#[derive(Debug)]
enum Place {
    /// In the session of this slot: at its beginning, or before its message of this number. A new
    /// session may take the slot before the next piece. It began after the snapshot did, so
    /// recovery gets it from the log, and it does not matter what is written of it here.
    Session {
        slot: usize,
        message: Option<u64>,
    },
    /// After the retained message of this topic.
    Retained(Option<Bytes>),
    End,
}

impl Default for Place {
    fn default() -> Self {
        Self::Session {
            slot: 0,
            message: None,
        }
    }
}

/// The next piece, of about `bytes_max`. A message is not divided, nor is the part of a session
/// before its messages.
pub(crate) fn next(
    sessions: &[Option<Box<Session>>],
    retained: &Retained,
    clock: &Clock,
    cursor: &mut ImageCursor,
    bytes_max: usize,
) -> Option<Vec<u8>> {
    let bytes_max = bytes_max.max(1);
    let mut piece = Encoder::default();
    while piece.len() < bytes_max {
        match &mut cursor.0 {
            Place::Session { slot, message } => match sessions.get(*slot) {
                Some(session) => {
                    let over = session.as_ref().is_none_or(|session| {
                        write_session(session, clock, message, &mut piece, bytes_max)
                    });
                    if over {
                        (*slot, *message) = (*slot + 1, None);
                    }
                }
                None => cursor.0 = Place::Retained(None),
            },
            Place::Retained(after) => {
                let Some(entry) = retained.after(after.as_deref()).next() else {
                    cursor.0 = Place::End;
                    continue;
                };
                piece.write(&Change::Retained {
                    message: Content::new(&entry.message, clock),
                    from: entry.from.as_ref().map(|from| &*from.client),
                });
                *after = Some(entry.message.topic.clone());
            }
            Place::End => break,
        }
    }
    (!piece.is_empty()).then(|| piece.take())
}

/// Writes a session from its message `next` on, or from its beginning. Returns true if it was
/// written to its end. Of a session that is not durable, only its recorded user is written.
fn write_session(
    session: &Session,
    clock: &Clock,
    next: &mut Option<u64>,
    piece: &mut Encoder,
    bytes_max: usize,
) -> bool {
    if !session.is_durable() {
        if let Some(user) = session.recorded_user() {
            piece.write(&Change::Session(session.number, Part::Owner(user)));
        }
        return true;
    }
    let from = match *next {
        Some(from) => from,
        None => {
            write_beginning(session, clock, piece);
            *next.insert(0)
        }
    };
    for recorded in session.queue.recorded_from(from) {
        if piece.len() >= bytes_max {
            return false;
        }
        *next = Some(recorded.number + 1);
        write_message(session.number, recorded, clock, piece);
    }
    true
}

/// Writes the part of a session before its messages.
fn write_beginning(session: &Session, clock: &Clock, piece: &mut Encoder) {
    let mut put = |part| piece.write(&Change::Session(session.number, part));
    let will = session.recorded_will();
    put(Part::Begin {
        client: &session.client,
        expiry_s: session.expiry_s(),
        will: will.map(|will| RecordedWill::new(will, clock)),
    });
    if let Some(user) = session.owner() {
        put(Part::Owner(user));
    }
    if let Some(since) = session.detached() {
        let at_ms = clock.wall_ms(since);
        put(Part::Detach(at_ms));
    }
    for (filter, subscription) in session.subscriptions().iter() {
        put(Part::Subscribe {
            filter,
            subscription,
            retained_pending: session.retained_pending(filter),
        });
    }
    for (packet_id, reason) in session.answered() {
        put(Part::Received { packet_id, reason });
    }
}

fn write_message(session: SessionId, recorded: Recorded<'_>, clock: &Clock, piece: &mut Encoder) {
    let Recorded {
        number,
        packet_id,
        queued,
    } = recorded;
    if let Some(queued) = queued {
        piece.message(session, number, queued, clock);
    }
    let Some(packet_id) = packet_id else { return };
    let part = match queued {
        Some(_) => Part::Sent { number, packet_id },
        None => Part::Released { number, packet_id },
    };
    piece.write(&Change::Session(session, part));
}
