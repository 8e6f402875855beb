//! Canonical JSON: two texts that say the same have the same digest.
//!
//! Members in any order, any white space and any escapes are the same; numbers are compared as their
//! literal text, because `1.0` and `1` are not the same to everybody, and `serde_json` would have to
//! be told so for the whole program (`arbitrary_precision`). `serde_json` decides what is JSON;
//! this file only cuts a text that it has accepted into pieces, in one pass.

use std::borrow::Cow;

use serde::de::IgnoredAny;

use crate::digest::Digest;

/// How deep arrays and objects may nest before a body counts as raw bytes: `serde_json`'s own limit.
pub(crate) const MAX_DEPTH: usize = 128;

/// A parsed text.
pub(crate) enum Json<'a> {
    /// `true`, `false`, `null` or a number, as written.
    Literal(&'a str),
    String(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    /// By name, ascending; no name twice.
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Json<'a> {
    /// `None` for what is not JSON, nests deeper than [`MAX_DEPTH`] or names a member twice: parsers
    /// disagree about what such a text says.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        serde_json::from_str::<IgnoredAny>(text).ok()?;
        Pieces { rest: text }.value(0)
    }

    /// What a pointer points at.
    pub(crate) fn at(&self, pointer: &Pointer) -> Option<&Self> {
        pointer.0.iter().try_fold(self, |value, token| match value {
            Self::Object(members) => {
                let place = members.binary_search_by(|(name, _)| name.as_ref().cmp(token)).ok()?;
                Some(&members[place].1)
            }
            Self::Array(items) => items.get(index(token)?),
            Self::Literal(_) | Self::String(_) => None,
        })
    }

    /// Without what a pointer points at.
    pub(crate) fn remove(&mut self, pointer: &Pointer) {
        let Some((last, parents)) = pointer.0.split_last() else {
            *self = Self::Literal("null");
            return;
        };
        let parent = parents.iter().try_fold(self, |value, token| match value {
            Self::Object(members) => {
                let place = members.binary_search_by(|(name, _)| name.as_ref().cmp(token)).ok()?;
                Some(&mut members[place].1)
            }
            Self::Array(items) => items.get_mut(index(token)?),
            Self::Literal(_) | Self::String(_) => None,
        });
        match parent {
            Some(Self::Object(members)) => members.retain(|(name, _)| name != last),
            // The others keep their places.
            Some(Self::Array(items)) => {
                if let Some(item) = index(last).and_then(|place| items.get_mut(place)) {
                    *item = Self::Literal("null");
                }
            }
            _ => {}
        }
    }

    /// Without members that are `null`.
    pub(crate) fn drop_nulls(&mut self) {
        match self {
            Self::Object(members) => {
                members.retain(|(_, value)| !value.is_null());
                members.iter_mut().for_each(|(_, value)| value.drop_nulls());
            }
            Self::Array(items) => items.iter_mut().for_each(Self::drop_nulls),
            Self::Literal(_) | Self::String(_) => {}
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Self::Literal("null"))
    }

    /// Adds the value to a digest.
    pub(crate) fn digest(&self, digest: &mut Digest) {
        match self {
            Self::Literal(text) => {
                digest.part("literal").part(text);
            }
            Self::String(text) => {
                digest.part("string").part(text.as_bytes());
            }
            Self::Array(items) => {
                digest.part("array").part((items.len() as u64).to_be_bytes());
                items.iter().for_each(|item| item.digest(digest));
            }
            Self::Object(members) => {
                digest.part("object").part((members.len() as u64).to_be_bytes());
                for (name, value) in members {
                    digest.part(name.as_bytes());
                    value.digest(digest);
                }
            }
        }
    }
}

/// A JSON pointer (RFC 6901): `/items/0/sku`; the empty one is the whole text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer(Vec<String>);

impl Pointer {
    /// `None` for what neither is empty nor starts with `/`, or has a `~` that escapes nothing.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(Vec::new()));
        }
        let tokens = text.strip_prefix('/')?.split('/');
        tokens.map(unescaped).collect::<Option<_>>().map(Self)
    }
}

fn unescaped(token: &str) -> Option<String> {
    let escapes = token.matches("~0").count() + token.matches("~1").count();
    // In this order: `~01` is `~1`.
    (token.matches('~').count() == escapes).then(|| token.replace("~1", "/").replace("~0", "~"))
}

fn index(token: &str) -> Option<usize> {
    let plain = token == "0" || !token.starts_with(['0', '+']);
    plain.then(|| token.parse().ok()).flatten()
}

/// What is left of a text that is known to be JSON.
struct Pieces<'a> {
    rest: &'a str,
}

impl<'a> Pieces<'a> {
    fn value(&mut self, depth: usize) -> Option<Json<'a>> {
        match self.peek()? {
            b'"' => self.string().map(Json::String),
            b'[' | b'{' if depth == MAX_DEPTH => None,
            b'[' => self.array(depth + 1),
            b'{' => self.object(depth + 1),
            _ => self.literal().map(Json::Literal),
        }
    }

    fn array(&mut self, depth: usize) -> Option<Json<'a>> {
        let mut items = Vec::new();
        self.take(b'[')?;
        while self.peek()? != b']' {
            items.push(self.value(depth)?);
            self.take(b',');
        }
        self.take(b']')?;
        Some(Json::Array(items))
    }

    fn object(&mut self, depth: usize) -> Option<Json<'a>> {
        let mut members = Vec::new();
        self.take(b'{')?;
        while self.peek()? != b'}' {
            self.peek()?;
            let name = self.string()?;
            self.take(b':')?;
            members.push((name, self.value(depth)?));
            self.take(b',');
        }
        self.take(b'}')?;
        members.sort_by(|(a, _), (b, _)| a.cmp(b));
        let unique = members.windows(2).all(|pair| pair[0].0 != pair[1].0);
        unique.then_some(Json::Object(members))
    }

    /// With its escapes resolved; `None` for a lone surrogate, which is no text.
    fn string(&mut self) -> Option<Cow<'a, str>> {
        let bytes = self.rest.as_bytes();
        let mut end = 1;
        let mut escaped = false;
        while bytes.get(end)? != &b'"' {
            if bytes[end] == b'\\' {
                escaped = true;
                end += 1;
            }
            end += 1;
        }
        let (quoted, rest) = self.rest.split_at_checked(end + 1)?;
        self.rest = rest;
        if escaped {
            serde_json::from_str::<String>(quoted).ok().map(Cow::Owned)
        } else {
            quoted.get(1..end).map(Cow::Borrowed)
        }
    }

    fn literal(&mut self) -> Option<&'a str> {
        let end = self
            .rest
            .find(|c: char| matches!(c, ',' | ']' | '}') || c.is_ascii_whitespace())
            .unwrap_or(self.rest.len());
        let (literal, rest) = self.rest.split_at_checked(end)?;
        self.rest = rest;
        Some(literal)
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
        self.rest.bytes().next()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.rest = &self.rest[1..])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn of(text: &str) -> Option<[u8; 32]> {
        let mut digest = Digest::new("test");
        Json::parse(text.as_bytes())?.digest(&mut digest);
        Some(digest.finish())
    }

    #[test]
    fn order_white_space_and_escapes_do_not_count() {
        let plain = of(r#"{"a":1,"b":[true,null,"é\n"]}"#);
        assert!(plain.is_some());
        assert_eq!(plain, of(" {\n\"b\" : [ true , null,\"\\u00e9\\u000a\" ] ,\t\"\\u0061\":1 }\r\n"));
    }

    #[test]
    fn values_count() {
        let all = [
            "1",
            "1.0",
            "1e0",
            "10",
            "-1",
            "\"1\"",
            "null",
            "true",
            "[]",
            "{}",
            "[1]",
            "[[1]]",
            "[1,2]",
            "[2,1]",
            "[12]",
            r#"{"a":null}"#,
            r#"{"a":1}"#,
            r#"{"b":1}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a":[],"b":1}"#,
            "\"\"",
            "123456789012345678901234567890",
            "0.1",
            "0.10",
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(of(a).is_some(), "{a}");
            assert!(all[i + 1..].iter().all(|b| of(a) != of(b)), "{a}");
        }
    }

    #[test]
    fn what_parsers_disagree_about_is_not_canonical() {
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(of(&deep(MAX_DEPTH)).is_some());
        assert!(of(&deep(MAX_DEPTH + 1)).is_none());
        assert!(of(&deep(400_000)).is_none());
        for bad in [
            r#"{"a":1,"a":2}"#,
            r#"{"a":1,"\u0061":1}"#,
            r#""\ud800""#,
            "",
            " ",
            "NaN",
            "01",
            "[1,]",
            "{\"a\":1,}",
            "1 2",
            "[1 2]",
            "\u{feff}1",
            "'a'",
            "-",
            "1.",
            "[",
            "\"\t\"",
        ] {
            assert!(of(bad).is_none(), "{bad}");
        }
        assert!(Json::parse(b"\"\xff\"").is_none());
    }

    #[test]
    fn pointers_point_as_rfc_6901_says() {
        let text = r#"{"foo":["bar","baz"],"":0,"a/b":1,"m~n":8,"o":{"p":null}}"#;
        let json = Json::parse(text.as_bytes()).unwrap();
        let at = |pointer: &str| match json.at(&Pointer::parse(pointer).unwrap()) {
            Some(Json::Literal(text)) => Some((*text).to_owned()),
            Some(Json::String(text)) => Some(text.to_string()),
            _ => None,
        };
        assert_eq!(at("/foo/0").as_deref(), Some("bar"));
        assert_eq!(at("/").as_deref(), Some("0"));
        assert_eq!(at("/a~1b").as_deref(), Some("1"));
        assert_eq!(at("/m~0n").as_deref(), Some("8"));
        assert_eq!(at("/o/p").as_deref(), Some("null"));
        for nothing in ["/foo/2", "/foo/01", "/foo/-", "/nope", "/foo/0/x"] {
            assert_eq!(at(nothing), None, "{nothing}");
        }
        for bad in ["foo", "/~", "/a~2", "~1"] {
            assert_eq!(Pointer::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_removed_does_not_count() {
        let of = |text: &str, pointer: &str| {
            let mut json = Json::parse(text.as_bytes()).unwrap();
            json.remove(&Pointer::parse(pointer).unwrap());
            let mut digest = Digest::new("test");
            json.digest(&mut digest);
            digest.finish()
        };
        assert_eq!(of(r#"{"a":1,"t":1}"#, "/t"), of(r#"{"t":2,"a":1}"#, "/t"));
        assert_eq!(of(r#"{"a":{"t":1}}"#, "/a/t"), of(r#"{"a":{}}"#, "/a/t"));
        assert_eq!(of(r#"{"a":[1,2]}"#, "/a/1"), of(r#"{"a":[1,3]}"#, "/a/1"));
        assert_ne!(of(r#"{"a":1}"#, "/t"), of(r#"{"a":2}"#, "/t"));
        assert_eq!(of("1", ""), of("[2]", ""));
    }

    #[test]
    fn nulls_can_be_dropped_wherever_they_are_members() {
        let of = |text: &str| {
            let mut json = Json::parse(text.as_bytes()).unwrap();
            json.drop_nulls();
            let mut digest = Digest::new("test");
            json.digest(&mut digest);
            digest.finish()
        };
        assert_eq!(of(r#"{"a":[{"b":null}],"c":null}"#), of(r#"{"a":[{}]}"#));
        assert_ne!(of("[null]"), of("[]"));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                proptest::collection::btree_map(any::<String>(), inner, 0..5)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// The same value written with members reversed, every character escaped and blanks everywhere.
    fn oddly(value: &Value) -> String {
        let string = |text: &str| {
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
            format!("\"{escaped}\"")
        };
        match value {
            Value::String(text) => string(text),
            Value::Array(items) => {
                format!("[ {} ]", items.iter().map(oddly).collect::<Vec<_>>().join(" ,\n"))
            }
            Value::Object(map) => {
                let members = map.iter().rev().map(|(k, v)| format!("{} :\t{}", string(k), oddly(v)));
                format!("{{\r\n{} }}", members.collect::<Vec<_>>().join(", "))
            }
            literal => literal.to_string(),
        }
    }

    proptest! {
        #[test]
        fn any_bytes_end_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Json::parse(&bytes);
        }

        #[test]
        fn any_text_of_json_characters_ends_as_serde_json_says(text in "[\\[\\]{}\",:\\\\u0-9a-f.eE+\\- \n]{0,40}") {
            let accepted = serde_json::from_str::<Value>(&text).is_ok();
            // Numbers out of range and repeated names are where the two may differ.
            if Json::parse(text.as_bytes()).is_some() && !text.contains(['e', 'E']) {
                prop_assert!(accepted, "{}", text);
            }
        }

        #[test]
        fn the_same_value_has_the_same_digest_however_it_is_written(value in any_json()) {
            prop_assert_eq!(of(&value.to_string()).unwrap(), of(&oddly(&value)).unwrap());
        }

        #[test]
        fn any_pointer_into_any_value_ends_without_a_panic(value in any_json(), pointer in "(/[a-z0-9~]{0,3}){0,4}") {
            let text = value.to_string();
            let mut json = Json::parse(text.as_bytes()).unwrap();
            if let Some(parsed) = Pointer::parse(&pointer) {
                prop_assert_eq!(json.at(&parsed).is_some(), value.pointer(&pointer).is_some());
                json.remove(&parsed);
            }
        }

        #[test]
        fn different_values_have_different_digests(a in any_json(), b in any_json()) {
            prop_assert_eq!(a == b, of(&a.to_string()) == of(&b.to_string()));
        }
    }
}
