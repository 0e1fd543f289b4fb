"""A server of a trained run: sentences in; trees and translations, or trees and classes out."""
