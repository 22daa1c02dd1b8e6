//! An order over MQTT, and the file that is put together for it.
//!
//! What enters: the text of an order whose signature was checked, then chunks in any order and any number of times. What
//! leaves: the whole file, or why something is refused. No I/O, no clock.

use serde::{Deserialize, Serialize};

use crate::config::ClientId;
use crate::limits;
use statehouse_core::policy::{CanaryRule, Digest};

/// What a store is told to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// Higher than that of every order before it: what was ordered once is not ordered again by repeating it.
    pub serial: u64,
    /// The names of the stores that carry it out. Without a target, a captured order could be
    /// published to every store that trusts the same key.
    #[serde(default)]
    pub stores: Vec<String>,
    /// What to do.
    pub action: Action,
    /// The policy. A shadow or a canary without one ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The bytes of its file, where that follows in chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// The BLAKE3 of each chunk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<Digest>,
    /// The share of requests that a shadow sees; all of them without this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_mille: Option<u16>,
    /// What a canary answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<CanaryRule>,
}

/// What to do with a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Hold it ready.
    Load,
    /// Let it answer.
    Promote,
    /// Let the one before answer again.
    Rollback,
    /// Compare it.
    Shadow,
    /// Let it answer some requests.
    Canary,
    /// Hold it ready no more.
    Unload,
}

/// Why an order or a chunk is refused. Its text is a sentence for whoever sent it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// Not JSON, or of another form.
    #[error("the order is not as it has to be: {0}")]
    Form(String),
    /// No target.
    #[error(
        "the order names no store: sign it with the store's name in `stores` (`statehouse policy push --store NAME`)"
    )]
    NoStore,
    /// More targets than an order may have.
    #[error("the order names {0} stores, and an order names at most {max}", max = limits::ORDER_STORES_MAX)]
    Stores(usize),
    /// A target that no store has as its name.
    #[error("`stores` of the order: {0}")]
    StoreName(String),
    /// Another target.
    #[error("the order is for other stores: the name of this store is {0}")]
    OtherStore(String),
    /// The action needs more.
    #[error("the order lacks `{0}`, which its action needs")]
    Lacks(&'static str),
    /// Too large.
    #[error("the order is for a file of {0} bytes, and a policy has at most {max}", max = limits::POLICY_FILE_BYTES_MAX)]
    Size(u64),
    /// Too many chunks, or too few.
    #[error(
        "{0} chunks are no way to send the file: there are at most {chunks} of at most {bytes} bytes",
        chunks = limits::ORDER_CHUNKS_MAX, bytes = limits::CHUNK_BYTES_MAX
    )]
    Chunks(usize),
    /// No such chunk.
    #[error("the order has no chunk of this number")]
    Index,
    /// Something else.
    #[error("the chunk is not the one that the order names")]
    Chunk,
    /// All chunks are there, and still it is another file.
    #[error("the chunks do not make the file that the order names")]
    File,
}

impl Order {
    /// Reads an order that was signed, if it is for this store.
    pub fn parse(payload: &[u8], store: &str) -> Result<Self, OrderError> {
        let order: Self =
            serde_json::from_slice(payload).map_err(|error| OrderError::Form(error.to_string()))?;
        order.check_target(store)?;
        order.check_parts()?;
        Ok(order)
    }

    fn check_target(&self, store: &str) -> Result<(), OrderError> {
        let count = self.stores.len();
        if count == 0 {
            return Err(OrderError::NoStore);
        }
        if count > limits::ORDER_STORES_MAX {
            return Err(OrderError::Stores(count));
        }
        for name in &self.stores {
            let _: ClientId = name.parse().map_err(OrderError::StoreName)?;
        }
        match self.stores.iter().any(|name| name == store) {
            true => Ok(()),
            false => Err(OrderError::OtherStore(store.to_owned())),
        }
    }

    /// Checks that the order has what its action needs.
    fn check_parts(&self) -> Result<(), OrderError> {
        let needs_digest = match self.action {
            Action::Load | Action::Promote | Action::Unload => true,
            Action::Rollback | Action::Shadow | Action::Canary => !self.chunks.is_empty(),
        };
        if needs_digest && self.digest.is_none() {
            return Err(OrderError::Lacks("digest"));
        }
        if self.action == Action::Load && self.chunks.is_empty() {
            return Err(OrderError::Lacks("chunks"));
        }
        if self.action == Action::Canary && self.digest.is_some() && self.rule.is_none() {
            return Err(OrderError::Lacks("rule"));
        }
        if self.chunks.is_empty() {
            return Ok(());
        }
        let size = self.size.ok_or(OrderError::Lacks("size"))?;
        if size > limits::POLICY_FILE_BYTES_MAX {
            return Err(OrderError::Size(size));
        }
        let count = self.chunks.len();
        let bytes_max = (count as u64).saturating_mul(limits::CHUNK_BYTES_MAX as u64);
        if count > limits::ORDER_CHUNKS_MAX || size > bytes_max {
            return Err(OrderError::Chunks(count));
        }
        Ok(())
    }

    /// The order as it is signed and sent.
    pub fn payload(&self) -> Vec<u8> {
        // It has no map with keys other than strings, and writing to memory does not fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// A file that arrives in pieces.
#[derive(Debug)]
pub(super) struct Assembly {
    order: Order,
    chunks: Vec<Option<Vec<u8>>>,
    missing: usize,
}

impl Assembly {
    /// Nothing of the order's file is here yet.
    pub(super) fn new(order: Order) -> Self {
        let missing = order.chunks.len();
        Self {
            order,
            chunks: vec![None; missing],
            missing,
        }
    }

    /// What it is for.
    pub(super) fn order(&self) -> &Order {
        &self.order
    }

    /// How many chunks are not here.
    pub(super) fn missing(&self) -> usize {
        self.missing
    }

    /// A chunk arrived, maybe once more.
    pub(super) fn put(&mut self, index: usize, bytes: &[u8]) -> Result<(), OrderError> {
        let named = self.order.chunks.get(index).ok_or(OrderError::Index)?;
        // Of the size nothing has to be believed: nobody can name the hash of what is larger and make it fit later.
        if bytes.len() > limits::CHUNK_BYTES_MAX || Digest::of(bytes) != *named {
            return Err(OrderError::Chunk);
        }
        // As long as the list of hashes.
        if let Some(place @ None) = self.chunks.get_mut(index) {
            *place = Some(bytes.to_vec());
            self.missing -= 1;
        }
        Ok(())
    }

    /// The file, once nothing is missing.
    pub(super) fn file(self) -> Result<(Order, Vec<u8>), OrderError> {
        let file: Vec<u8> = self.chunks.into_iter().flatten().flatten().collect();
        if self.missing > 0
            || self.order.size != Some(file.len() as u64)
            || self.order.digest != Some(Digest::of(&file))
        {
            return Err(OrderError::File);
        }
        Ok((self.order, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(file: &[u8], chunk_bytes: usize) -> Order {
        Order {
            serial: 7,
            stores: vec!["here".into()],
            action: Action::Promote,
            digest: Some(Digest::of(file)),
            size: Some(file.len() as u64),
            chunks: file.chunks(chunk_bytes).map(Digest::of).collect(),
            per_mille: None,
            rule: None,
        }
    }

    #[test]
    fn chunks_come_in_any_order_and_more_than_once() {
        let file: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let order = order(&file, 300);
        assert_eq!(Order::parse(&order.payload(), "here").unwrap(), order);
        let mut assembly = Assembly::new(order.clone());
        let chunks: Vec<&[u8]> = file.chunks(300).collect();
        for index in [3, 0, 0, 2, 3] {
            assembly.put(index, chunks[index]).unwrap();
        }
        assert_eq!(assembly.missing(), 1);
        assert_eq!(assembly.put(1, chunks[0]), Err(OrderError::Chunk));
        assert_eq!(assembly.put(4, chunks[0]), Err(OrderError::Index));
        assembly.put(1, chunks[1]).unwrap();
        assert_eq!(assembly.file().unwrap(), (order, file));
    }

    #[test]
    fn a_file_that_is_not_the_named_one_is_none() {
        let file = b"0123456789";
        for wrong in [
            Order {
                size: Some(9),
                ..order(file, 5)
            },
            Order {
                digest: Some(Digest::of(b"other")),
                ..order(file, 5)
            },
        ] {
            let mut assembly = Assembly::new(wrong);
            for (index, chunk) in file.chunks(5).enumerate() {
                assembly.put(index, chunk).unwrap();
            }
            assert_eq!(assembly.file(), Err(OrderError::File));
        }
        assert_eq!(Assembly::new(order(file, 5)).file(), Err(OrderError::File));
    }

    #[test]
    fn orders_are_bounded_and_whole() {
        let whole = |text: &str| {
            let text = text.replace("\"serial\"", "\"stores\":[\"here\"],\"serial\"");
            Order::parse(text.as_bytes(), "here")
        };
        let parse = |text: &str| whole(text).unwrap_err().to_string();
        let digest = Digest::of(b"x");
        for (text, says) in [
            ("", "not as it has to be"),
            ("{}", "serial"),
            (r#"{"serial":1,"action":"explode"}"#, "explode"),
            (r#"{"serial":1,"action":"rollback","more":1}"#, "more"),
            (r#"{"serial":1,"action":"promote"}"#, "`digest`"),
            (r#"{"serial":-1,"action":"rollback"}"#, "-1"),
            (
                &format!(r#"{{"serial":1,"action":"load","digest":"{digest}"}}"#),
                "`chunks`",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","chunks":["{digest}"]}}"#
                ),
                "`size`",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","size":999999999999,"chunks":["{digest}"]}}"#
                ),
                "999999999999 bytes",
            ),
            (
                &format!(
                    r#"{{"serial":1,"action":"load","digest":"{digest}","size":300000,"chunks":["{digest}"]}}"#
                ),
                "1 chunks",
            ),
        ] {
            assert!(parse(text).contains(says), "{text}: {}", parse(text));
        }
        let canary = format!(r#"{{"serial":1,"action":"canary","digest":"{digest}"}}"#);
        assert!(parse(&canary).contains("`rule`"));
        let rule = canary.replace('}', r#","rule":{"percent":5}}"#);
        assert!(whole(&rule).is_ok(), "{rule}");
        assert!(whole(r#"{"serial":1,"action":"shadow"}"#).is_ok());
        assert!(whole(r#"{"serial":1,"action":"rollback"}"#).is_ok());
    }

    #[test]
    fn an_order_is_only_for_the_stores_it_names() {
        let parse = |stores: &str, store: &str| {
            let text = format!(r#"{{"serial":1,"action":"rollback"{stores}}}"#);
            Order::parse(text.as_bytes(), store).map(|order| order.stores)
        };
        for stores in [r#","stores":["a"]"#, r#","stores":["b","a"]"#] {
            assert!(parse(stores, "a").is_ok(), "{stores}");
            for other in ["c", "A", "", "*"] {
                let refused = Err(OrderError::OtherStore(other.into()));
                assert_eq!(parse(stores, other), refused, "{stores}");
            }
        }
        // Names are compared byte by byte: no pattern matches every store.
        for stores in [r#","stores":["*"]"#, r#","stores":["a*"]"#] {
            assert_eq!(parse(stores, "a"), Err(OrderError::OtherStore("a".into())));
        }
        for stores in ["", r#","stores":[]"#] {
            assert_eq!(parse(stores, "a"), Err(OrderError::NoStore));
        }
        let list = |names: &[&str]| format!(r#","stores":{}"#, serde_json::json!(names));
        let most = ["a"; limits::ORDER_STORES_MAX + 1];
        assert!(parse(&list(&most[1..]), "a").is_ok());
        assert_eq!(
            parse(&list(&most), "a"),
            Err(OrderError::Stores(most.len()))
        );
        let long = "a".repeat(limits::BROKER_CLIENT_ID_BYTES_MAX + 1);
        assert!(parse(&list(&[&long[1..]]), &long[1..]).is_ok());
        for name in [&long, "", "b\n"] {
            let refused = parse(&list(&["a", name]), "a");
            assert!(matches!(refused, Err(OrderError::StoreName(_))), "{name:?}");
        }
        let form = parse(r#","stores":"a""#, "a");
        assert!(matches!(form, Err(OrderError::Form(_))), "{form:?}");
    }
}
