(* T6: EMA momentum that goes on moving idle blocks. In z = x - eta beta/(1 - beta) m it is plain block descent with
   gradients read at the displaced point x; from this a descent inequality and, summed, convergence. *)
From Coq Require Import Reals Lra Psatz Lia FunctionalExtensionality.
From LCSB Require Import FinSum Vectors Blocks BlockDescent.
Open Scope R_scope.

Definition idle_momentum (blk b : nat -> nat) (grad : vec -> vec) (eta beta : R) (x m : nat -> vec) : Prop :=
  forall t, m (S t) = axpy (fun j => beta * m t j) (1 - beta) (proj blk (b t) (grad (x t)))
    /\ x (S t) = axpy (x t) (- eta) (m (S t)).

Definition shadow (eta beta : R) (x m : nat -> vec) (t : nat) : vec :=
  axpy (x t) (- (eta * beta / (1 - beta))) (m t).

Section Momentum.
Variables (n : nat) (blk b : nat -> nat) (f : vec -> R) (grad : vec -> vec) (Li : nat -> R).
Variables (Lmax L eta beta fmin kappa : R) (x m : nat -> vec).
Hypothesis smooth : block_smooth n blk f grad Li.
Hypothesis Li_le : forall i, Li i <= Lmax.
Hypothesis L_nonneg : 0 <= L.
Hypothesis lip : lipschitz n grad L.
Hypothesis eta_pos : 0 < eta.
Hypothesis beta01 : 0 <= beta < 1.
Hypothesis run : idle_momentum blk b grad eta beta x m.
Let z := shadow eta beta x m.
Let g t := proj blk (b t) (grad (x t)).

Theorem change_of_variable t : z (S t) = axpy (z t) (- eta) (g t).
Proof.
  destruct (run t) as [Hm Hx]. apply functional_extensionality. intros j.
  unfold z, shadow, g. rewrite Hx, Hm. unfold axpy. field. lra.
Qed.

Let coupling := eta * beta / (1 - beta).
Lemma coupling_nonneg : 0 <= coupling.
Proof. apply div_nonneg; [apply Rmult_le_pos|]; lra. Qed.

(* the gradient that z's step uses is read at x; it costs at most coupling * L * |m| *)
Theorem momentum_descent t : f (z (S t)) <= f (z t) - eta * (1 - eta * Lmax / 2) * nrm n (g t) ^ 2
  + eta * (coupling * L) * (nrm n (m t) * nrm n (g t)).
Proof.
  rewrite change_of_variable. pose proof (smooth (b t) (z t) (- eta) (grad (x t))) as S. fold (g t) in S.
  pose proof (nrm_nonneg n (g t)) as G. pose proof (nrm_nonneg n (m t)) as M. pose proof coupling_nonneg as C.
  set (e := proj blk (b t) (vsub (grad (z t)) (grad (x t)))).
  assert (E : nrm n e <= L * (coupling * nrm n (m t))).
  { eapply Rle_trans; [apply nrm_proj_le|]. eapply Rle_trans; [apply lip|].
    apply Rmult_le_compat_l; [assumption|]. apply nrm_le_of_sq; [apply Rmult_le_pos; assumption|].
    rewrite Rpow_mult_distr, nrm_sq. right. unfold dot. rewrite <- psum_scal. apply psum_ext.
    intros j _. unfold z, shadow, vsub, axpy. fold coupling. ring. }
  assert (D : dot n (proj blk (b t) (grad (z t))) (g t) = nrm n (g t) ^ 2 + dot n (g t) e).
  { rewrite nrm_sq. unfold e. rewrite proj_vsub, dot_vsub_r, (dot_comm n (proj blk (b t) (grad (z t)))).
    fold (g t). ring. }
  assert (H : - dot n (g t) e <= nrm n (g t) * (L * (coupling * nrm n (m t)))).
  { eapply Rle_trans; [apply Rle_abs|]. rewrite Rabs_Ropp.
    eapply Rle_trans; [apply cauchy_schwarz|]. apply Rmult_le_compat_l; assumption. }
  apply (Rmult_le_compat_l eta) in H; [|lra].
  assert (Li (b t) / 2 * (- eta) ^ 2 * nrm n (g t) ^ 2 <= Lmax / 2 * eta ^ 2 * nrm n (g t) ^ 2).
  { replace ((- eta) ^ 2) with (eta ^ 2) by ring. apply Rmult_le_compat_r; [apply pow2_ge_0|].
    apply Rmult_le_compat_r; [apply pow2_ge_0|]. specialize (Li_le (b t)). lra. }
  rewrite D in S. lra.
Qed.

Hypothesis m0 : m 0%nat = (fun _ => 0).

(* the momenta never hold more than the gradients put in: kappa = 1 in what follows *)
Theorem momentum_mass T : psum (fun t => nrm n (m t) ^ 2) T <= psum (fun t => nrm n (g t) ^ 2) T.
Proof.
  enough (H : (1 - beta) * psum (fun t => nrm n (m t) ^ 2) T + nrm n (m T) ^ 2
              <= (1 - beta) * psum (fun t => nrm n (g t) ^ 2) T).
  { pose proof (pow2_ge_0 (nrm n (m T))). apply Rmult_le_reg_l with (1 - beta); lra. }
  induction T as [|T IH].
  - assert (Z : nrm n (m 0%nat) ^ 2 = 0); [|simpl psum; lra].
    rewrite m0, nrm_sq. unfold dot. rewrite (psum_ext _ (fun _ => 0)) by (intros; ring).
    rewrite psum_const. ring.
  - rewrite !psum_S. destruct (run T) as [Hm _]. fold (g T) in Hm.
    assert (E : nrm n (m (S T)) ^ 2 <= beta * nrm n (m T) ^ 2 + (1 - beta) * nrm n (g T) ^ 2).
    { rewrite Hm, !nrm_sq, dot_axpy_sq.
      replace (dot n (fun j => beta * m T j) (fun j => beta * m T j)) with (beta ^ 2 * dot n (m T) (m T))
        by (unfold dot; rewrite <- psum_scal; apply psum_ext; intros; ring).
      replace (dot n (fun j => beta * m T j) (g T)) with (beta * dot n (m T) (g T))
        by (unfold dot; rewrite <- psum_scal; apply psum_ext; intros; ring).
      pose proof (dot_self_nonneg n (axpy (m T) (-1) (g T))) as Y. rewrite dot_axpy_sq in Y.
      assert (0 <= beta * (1 - beta)) by (apply Rmult_le_pos; lra). nra. }
    lra.
Qed.

Hypothesis below : forall y, fmin <= f y.
Hypothesis kappa_nonneg : 0 <= kappa.
Hypothesis mass : forall T, psum (fun t => nrm n (m t) ^ 2) T <= kappa ^ 2 * psum (fun t => nrm n (g t) ^ 2) T.

Theorem momentum_sum T : 0 < 1 - eta * Lmax / 2 - kappa * (coupling * L) ->
  psum (fun t => nrm n (g t) ^ 2) T
    <= (f (x 0%nat) - fmin) / (eta * (1 - eta * Lmax / 2 - kappa * (coupling * L))).
Proof.
  intros P. set (G := psum (fun t => nrm n (g t) ^ 2) T).
  assert (tele : f (z T) <= f (z 0%nat) - eta * (1 - eta * Lmax / 2) * G
    + eta * (coupling * L) * psum (fun t => nrm n (m t) * nrm n (g t)) T).
  { unfold G. clear G P. induction T as [|T IH]; [simpl; lra|].
    rewrite !psum_S. pose proof (momentum_descent T). lra. }
  assert (sq : forall v : nat -> R, dot T v v = psum (fun t => v t ^ 2) T)
    by (intros; apply psum_ext; intros; ring).
  assert (G0 : 0 <= G) by (apply psum_nonneg; intros; apply pow2_ge_0).
  assert (CS : psum (fun t => nrm n (m t) * nrm n (g t)) T <= kappa * G).
  { change (dot T (fun t => nrm n (m t)) (fun t => nrm n (g t)) <= kappa * G).
    eapply Rle_trans; [apply Rle_abs|]. eapply Rle_trans; [apply cauchy_schwarz|].
    apply Rle_trans with (kappa * sqrt G * sqrt G); [|rewrite Rmult_assoc, sqrt_sqrt by exact G0; lra].
    pose proof (sqrt_pos G). apply Rmult_le_compat; try apply nrm_nonneg; apply nrm_le_of_sq; try assumption.
    - apply Rmult_le_pos; assumption.
    - rewrite Rpow_mult_distr, pow2_sqrt, sq by exact G0. apply mass.
    - rewrite pow2_sqrt, sq by exact G0. apply Rle_refl. }
  apply (Rmult_le_compat_l (eta * (coupling * L))) in CS;
    [|apply Rmult_le_pos; [lra|apply Rmult_le_pos; [apply coupling_nonneg|assumption]]].
  assert (Z0 : z 0%nat = x 0%nat)
    by (apply functional_extensionality; intros j; unfold z, shadow, axpy; rewrite m0; ring).
  rewrite Z0 in tele. specialize (below (z T)).
  apply Rmult_le_reg_l with (eta * (1 - eta * Lmax / 2 - kappa * (coupling * L)));
    [apply Rmult_lt_0_compat; lra|].
  replace (eta * (1 - eta * Lmax / 2 - kappa * (coupling * L)) * ((f (x 0%nat) - fmin)
    / (eta * (1 - eta * Lmax / 2 - kappa * (coupling * L))))) with (f (x 0%nat) - fmin) by (field; split; lra).
  lra.
Qed.
End Momentum.
