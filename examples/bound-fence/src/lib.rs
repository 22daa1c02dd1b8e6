//! A key `bound/LOCK/…` is written only by who holds the lock `LOCK` now: with a fencing token that is the current
//! version of the key `LOCK`. Everything else is the standard policy's.
//!
//! The protocol compares a token with the highest one that a key has seen. So a key that no holder has written
//! yet is open to everybody, a holder whose lock has expired may write until the next one has, and any client can
//! make up a token from the future. Here the token is compared with the lock itself, in the same step as the
//! write: there is no moment between the two.
//!
//! What enters: any request. What leaves: the standard answer, or a refusal that changes nothing.

#![deny(unsafe_code)]

use statehouse_guest::{Command, Refusal, Rule, Ruled, fence};
use statehouse_policy::{Access, Bytes, Host, Request, Span, resp};

/// What protected keys begin with; the name of the lock follows, up to the next slash.
const PREFIX: &[u8] = b"bound/";

/// The rule.
pub struct BoundFence;

impl Rule for BoundFence {
    const NAME: &'static str = "bound-fence";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");

    /// Whether the request comes from who holds the lock of the key that it changes.
    fn admit(host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal> {
        let Some(key) = command.written() else {
            return Ok(());
        };
        let Some(lock) = lock_of(&request.payload, key) else {
            return Ok(());
        };
        // Who may not write the key learns nothing about its lock.
        host.head(&Bytes::Span(key), Access::Write)?;
        let token = fence::token(request)?.ok_or(Refusal::FenceMissing)?;
        let lock = host.head(&Bytes::Span(lock), Access::Read)?;
        let Some(lock) = lock else {
            return Err(Refusal::Other(
                "nobody holds the lock of this key".to_owned(),
            ));
        };
        // The node of a version is the store's own, and no two versions of a store have the same time and counter.
        let given = token.stamp();
        if (given.wall, given.counter) != (lock.version.wall, lock.version.counter) {
            return Err(Refusal::Other(
                "the fencing token is not the current version of the lock of this key".to_owned(),
            ));
        }
        Ok(())
    }
}

/// Where the name of the lock stands, if the key is protected by one.
fn lock_of(payload: &[u8], key: Span) -> Option<Span> {
    let rest = payload[resp::range(key)].strip_prefix(PREFIX)?;
    let len = rest.iter().position(|&byte| byte == b'/')?;
    Some(Span {
        at: key.at + PREFIX.len() as u32,
        // Within the key, whose length is one.
        len: len as u32,
    })
    .filter(|lock| lock.len > 0)
}

statehouse_policy::export!(Ruled<BoundFence>);

#[cfg(test)]
mod tests {
    use statehouse_policy::Policy;
    use statehouse_policy::testing::{Tabled, cases};

    #[test]
    fn cases() {
        let policy =
            super::Ruled::<super::BoundFence>::configure(&[]).expect("it takes no options");
        let requests = cases::run(include_str!("../cases.txt"), &mut Tabled::new(&policy));
        assert_eq!(requests, Ok(20));
    }
}
